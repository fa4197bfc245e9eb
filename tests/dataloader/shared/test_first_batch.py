"""What jobs show of a first batch names the leaf that differs."""

import torch

from everstep.dataloader.shared.first_batch import leaf_digests


def test_the_first_leaf_that_differs_is_told_by_its_path() -> None:
    one = leaf_digests({"x": torch.zeros(2), "y": [1, torch.ones(3)]})
    two = leaf_digests({"x": torch.zeros(2), "y": [1, torch.full((3,), 2.0)]})
    assert [a[0] for a, b in zip(one, two, strict=True) if a != b] == ["batch['y'][1]"]


def test_what_is_beyond_the_leaves_compared_singly_is_compared_as_a_whole() -> None:
    one, two = leaf_digests(list(range(5000))), leaf_digests([*range(4999), -1])
    assert len(one) < 5000
    assert [a[0] for a, b in zip(one, two, strict=True) if a != b] == ["(all that follows)"]


def test_samples_that_one_job_had_to_leave_out_are_named_first() -> None:
    one, two = leaf_digests([1]), leaf_digests([1], left_out=(7, 3))
    assert [one[0][0], two[0][0]] == ["batch", "samples [3, 7] quarantined"]
