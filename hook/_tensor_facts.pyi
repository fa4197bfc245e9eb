from types import CapsuleType

import torch

def facts(exchange: CapsuleType, tensors: tuple[torch.Tensor, ...], /) -> bytes: ...
