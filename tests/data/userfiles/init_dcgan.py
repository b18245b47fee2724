"""DCGAN's networks with weights_init, old tensor constructors and Variables."""
import torch
import torch.nn as nn
from torch.autograd import Variable


def weights_init(m):
    name = m.__class__.__name__
    if name.find("Conv") != -1:
        nn.init.normal_(m.weight.data, 0.0, 0.02)
    elif name.find("BatchNorm") != -1:
        m.weight.data.normal_(1.0, 0.02)
        m.bias.data.fill_(0)


class GAN(nn.Module):
    def __init__(self, nz=64, f=32):
        super().__init__()
        self.g = nn.Sequential(
            nn.ConvTranspose2d(nz, f * 4, 4, 1, 0, bias=False), nn.BatchNorm2d(f * 4), nn.ReLU(True),
            nn.ConvTranspose2d(f * 4, f, 4, 4, 0, bias=False), nn.BatchNorm2d(f), nn.ReLU(True), nn.ConvTranspose2d(f, 3, 4, 2, 1), nn.Tanh(),
        )
        self.d = nn.Sequential(nn.Conv2d(3, f, 4, 2, 1), nn.LeakyReLU(0.2, inplace=True), nn.Conv2d(f, 1, 16, 1, 0), nn.Sigmoid())
        self.fixed = torch.FloatTensor(8, nz, 1, 1).normal_(0, 1)
        self.real_label, self.criterion = 1.0, nn.BCELoss()

    def forward(self, images):
        n = images.size(0)
        noise = Variable(torch.FloatTensor(n, 64, 1, 1).normal_(0, 1))
        label = torch.full((n,), self.real_label, dtype=torch.float, device=images.device)
        real = self.criterion(self.d(images).view(-1), label)
        fake = self.criterion(self.d(self.g(noise)).view(-1), torch.Tensor(n).fill_(0.0))
        return real + fake


def build():
    net = GAN()
    net.apply(weights_init)
    return net


def batch(micro_batch):
    return torch.rand(micro_batch, 3, 32, 32)
