"""Writes model.onnx: a linear regressor that starts at zero (needs `pip install certdp[torch]`)."""

from pathlib import Path

import torch

from models import zoo

model = zoo.Linear(inputs=8).build()
for parameter in model.parameters():
    torch.nn.init.zeros_(parameter)
zoo.export(model, Path(__file__).with_name("model.onnx"), input_shape=(8,))
