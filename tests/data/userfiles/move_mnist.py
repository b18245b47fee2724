"""The usual first network, moved to the GPU the usual way."""
import torch
import torch.nn as nn
import torch.nn.functional as F

device = torch.device("cuda")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 3, 1), nn.Conv2d(32, 64, 3, 1)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(9216, 128), nn.Linear(128, 10)

    def forward(self, x):
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = torch.flatten(self.dropout1(F.max_pool2d(x, 2)), 1)
        return F.log_softmax(self.fc2(self.dropout2(F.relu(self.fc1(x)))), dim=1)


def model():
    torch.manual_seed(1)
    net = Net().to(device)
    print("on", torch.cuda.get_device_name(0))
    return net


def batch(micro_batch):
    return torch.randn(micro_batch, 1, 28, 28).to(device), torch.randint(0, 10, (micro_batch,), device=device)


def loss(output, batch):
    return F.nll_loss(output, batch[1])


class _Only(Net):
    pass


_forward = Net.forward
Net.forward = lambda self, x, y=None: _forward(self, x)
