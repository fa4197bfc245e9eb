from collections.abc import Callable

import torch

def facts(
    exchange: object,
    tensors: tuple[torch.Tensor, ...],
    noted: int,
    memory_of: Callable[[torch.Tensor], torch.UntypedStorage],
    /,
) -> tuple[bytes, list[int], list[torch.UntypedStorage]]: ...
