import torch

def facts(
    exchange: object, tensors: tuple[torch.Tensor, ...], noted: int, /
) -> tuple[bytes, list[int], list[torch.UntypedStorage]]: ...
