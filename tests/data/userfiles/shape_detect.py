"""A detector's loss over positive anchors, and a hand-written NMS on its proposals."""
import torch
from torch import nn


def iou(a, b):
    lt, rb = torch.max(a[:, None, :2], b[None, :, :2]), torch.min(a[:, None, 2:], b[None, :, 2:])
    inter = (rb - lt).clamp(min=0).prod(-1)
    area = lambda x: (x[:, 2] - x[:, 0]) * (x[:, 3] - x[:, 1])
    return inter / (area(a)[:, None] + area(b)[None] - inter + 1e-6)


def nms(boxes, scores, threshold):
    order, keep = scores.argsort(descending=True), []
    while order.numel() > 0:
        best = order[0]
        keep.append(best)
        if len(keep) == 20 or order.numel() == 1:
            break
        others = iou(boxes[best][None], boxes[order[1:]])[0]
        order = order[1:][others <= threshold]
    return torch.stack(keep)


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, 1), nn.ReLU(), nn.Conv2d(64, 64, 3, 2, 1), nn.ReLU())
        self.score, self.box, self.second = nn.Conv2d(64, 1, 1), nn.Conv2d(64, 4, 1), nn.Linear(4, 8)

    def forward(self, images, targets):
        f = self.backbone(images)
        scores = self.score(f).flatten(1)
        boxes = self.box(f).flatten(2).transpose(1, 2)
        total = scores.new_zeros(())
        for s, b, t in zip(scores, boxes, targets):
            center = b.detach().sigmoid()
            corners = torch.cat([center[:, :2] - center[:, 2:] / 2, center[:, :2] + center[:, 2:] / 2], -1)
            best, index = iou(corners, t).max(dim=1)
            positive = best > 0.5
            if positive.sum() == 0:
                positive[best.argmax()] = True
            total = total + nn.functional.binary_cross_entropy_with_logits(s, positive.float())
            total = total + nn.functional.l1_loss(b[positive], t[index[positive]])
            kept = nms(corners, s.detach(), 0.7)
            total = total + self.second(b[kept]).mean()
        return total / len(images)


def build():
    return Detector()


def batch(micro_batch):
    corner = torch.rand(micro_batch, 5, 2) * 0.5
    return {"images": torch.rand(micro_batch, 3, 128, 128), "targets": torch.cat([corner, corner + 0.3], -1)}
