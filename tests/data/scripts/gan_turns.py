import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
G = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 784), nn.Tanh()).to(device)
D = nn.Sequential(nn.Linear(784, 256), nn.LeakyReLU(0.2), nn.Linear(256, 1)).to(device)
opt_g = torch.optim.Adam(G.parameters(), lr=2e-4, betas=(0.5, 0.999))
opt_d = torch.optim.Adam(D.parameters(), lr=2e-4, betas=(0.5, 0.999))
bce = nn.BCEWithLogitsLoss()
loader = DataLoader(TensorDataset(torch.rand(1000, 784)), batch_size=128, shuffle=True)
for epoch in range(2):
    for i, (real,) in enumerate(loader):
        real = real.to(device)
        one, zero = torch.ones(len(real), 1, device=device), torch.zeros(len(real), 1, device=device)
        fake = G(torch.randn(len(real), 64, device=device))
        opt_d.zero_grad()
        loss_d = bce(D(real), one) + bce(D(fake.detach()), zero)
        loss_d.backward()
        opt_d.step()
        opt_g.zero_grad()
        loss_g = bce(D(fake), one)
        loss_g.backward()
        opt_g.step()
        if i % 10 == 0:
            print(epoch, i, loss_d.item(), loss_g.item())
