"""Steps and copies on a CUDA device; without one, that nothing is measured and nothing is changed."""

import pytest
import torch

from everstep.dataloader.analysis.device_clock import CopyWatch, DeviceMarks, device_in_use


def test_without_a_device_nothing_is_touched() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    move = torch.Tensor.to
    marks, copies = DeviceMarks(), CopyWatch()
    copies.install()
    marks.begin()
    marks.mark()
    assert torch.Tensor.to is move
    assert marks.step_times_s() == []
    assert copies.total_s() == 0.0
    assert not device_in_use()
    copies.remove()


@pytest.mark.gpu
def test_steps_and_copies_are_timed_on_the_device() -> None:
    matrix = torch.ones(4096, 4096, device="cuda")
    host = torch.ones(64 * 2**20).pin_memory()
    move = torch.Tensor.to
    marks, copies = DeviceMarks(), CopyWatch()
    copies.install()
    marks.begin()
    for _ in range(3):
        for _ in range(20):
            matrix = (matrix @ matrix).clamp(max=1.0)
        host.to("cuda", non_blocking=True)
        host.to(torch.float64)  # stays where it is
        marks.mark()
    times_s = marks.step_times_s()
    assert len(times_s) == 3
    assert min(times_s) > 0.0
    assert 0.0 < copies.total_s() < sum(times_s)
    copies.remove()
    assert torch.Tensor.to is move
