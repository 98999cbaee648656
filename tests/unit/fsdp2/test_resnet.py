"""A ResNet-18 trains with Muon on its convolutions, sharded as on one process."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from megatron_eopt.fsdp2 import build_optimizer
from tests.harness import run_ranks
from tests.unit.fsdp2.model import config, eager, far, weights

STEPS, WIDTH = 5, 16  # a quarter of the usual width, to be quick


def conv(inputs, outputs, size, stride=1):
    return nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)


class Block(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1, self.bn1 = conv(inputs, outputs, 3, stride), nn.BatchNorm2d(outputs)
        self.conv2, self.bn2 = conv(outputs, outputs, 3), nn.BatchNorm2d(outputs)
        self.downsample = nn.Identity()
        if stride > 1:
            self.downsample = nn.Sequential(
                conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs)
            )

    def forward(self, x):
        out = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return torch.relu(out + self.downsample(x))


class ResNet18(nn.Module):
    """With the stem for images of 32 x 32."""

    def __init__(self, classes=10):
        super().__init__()
        self.conv1, self.bn1 = conv(3, WIDTH, 3), nn.BatchNorm2d(WIDTH)
        sizes = [(WIDTH * 2 ** max(n - 1, 0), WIDTH * 2**n, min(n, 1) + 1) for n in range(4)]
        self.layers = nn.Sequential(
            *(nn.Sequential(Block(a, b, s), Block(b, b, 1)) for a, b, s in sizes)
        )
        self.fc = nn.Linear(WIDTH * 8, classes)

    def forward(self, x):
        return self.fc(self.layers(torch.relu(self.bn1(self.conv1(x)))).mean(dim=(2, 3)))


@eager
def train(shards):
    """Return the losses, the weights, and the optimizer of each convolution."""
    torch.manual_seed(1)
    model = ResNet18()
    images, labels = torch.randn(8, 3, 32, 32), torch.arange(8)
    if shards:
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        for block in model.layers:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    settings = config(muon_convolutions=True, muon_scale_mode="adamw_rms", lr=0.01)
    optimizer = build_optimizer(model, settings, output_layers=["fc"])
    of_muon = {
        optimizer.names[param]
        for group in optimizer.param_groups
        if group["optimizer"] == "muon"
        for param in group["params"]
    }
    losses = []
    for _ in range(STEPS):
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    convs = {f"{n}.weight" for n, m in model.named_modules() if isinstance(m, nn.Conv2d)}
    assert of_muon == convs - {"conv1.weight"}  # that is the input layer
    assert len(convs) == 20
    return losses, weights(model)


def test_two_processes_train_as_one_does():
    losses, alone = train(shards=False)
    assert losses[-1] < 0.3 * losses[0]
    for theirs, sharded in run_ranks(2, train, True, cpu=False):
        assert max(abs(a - b) for a, b in zip(losses, theirs, strict=True)) < 1e-3
        assert far(sharded, alone)[0] < 1e-3
