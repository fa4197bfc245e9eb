"""Memory of a device for copies: what counts as free."""

import pytest
import torch

from everstep.hook.cuda_room import CudaRoom


@pytest.mark.gpu
class TestRoom:
    SIZE_BYTES = 64 * 1024**2
    NEXT_TO_NOTHING_BYTES = 4 * 1024**2
    """What the driver may need for itself."""

    def test_what_a_copy_had_counts_as_free_wherever_it_is_now(self) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        room = CudaRoom(device, torch.cuda.Stream(device))
        torch.cuda.empty_cache()
        found = [room.free_bytes(self.SIZE_BYTES)]
        taken = room.take(self.SIZE_BYTES)
        assert taken is not None
        assert taken.nbytes == self.SIZE_BYTES
        del taken
        found.append(room.free_bytes(self.SIZE_BYTES))  # in the stream's part of the cache
        assert room.free_bytes(2 * self.SIZE_BYTES) <= found[0] - self.SIZE_BYTES  # it is too small for that
        torch.cuda.empty_cache()
        found.append(room.free_bytes(self.SIZE_BYTES))  # with the driver
        assert max(found) - min(found) <= self.NEXT_TO_NOTHING_BYTES

    def test_what_training_will_need_again_is_not_free(self) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        room = CudaRoom(device, torch.cuda.Stream(device))
        torch.cuda.empty_cache()
        before = room.free_bytes(1)
        activations = torch.empty(self.SIZE_BYTES, dtype=torch.uint8, device=device)
        del activations
        assert room.free_bytes(1) <= before - self.SIZE_BYTES + self.NEXT_TO_NOTHING_BYTES
