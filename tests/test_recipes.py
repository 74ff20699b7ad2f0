from __future__ import annotations

import pytest
import torch

from inplace_abn.recipes.metrics import confusion, mean_iou, pixel_accuracy
from inplace_abn.recipes.scenes import CLASSES, COLOURS, VOID, StreetScenes, scene


def test_scenes_are_the_same_every_time_and_differ_from_each_other():
    for i in range(5):
        (image, label), (again, label_again) = scene(i), scene(i)
        assert torch.equal(image, again) and torch.equal(label, label_again)
    pictures = torch.stack([scene(i, seed=s)[0] for i in range(5) for s in range(2)])
    assert torch.unique(pictures.flatten(1), dim=0).shape[0] == 10


def test_scenes_do_not_touch_the_global_random_state():
    before = torch.get_rng_state()
    scene(0)
    assert torch.equal(torch.get_rng_state(), before)


def test_every_class_occurs_and_labels_are_known():
    scenes = StreetScenes(60, seed=3)
    labels = torch.stack([scenes[i][1] for i in range(60)])
    counts = torch.bincount(labels.flatten(), minlength=VOID + 1)
    assert (counts[: len(CLASSES)] > 0.002 * labels.numel()).all()
    assert counts[VOID] > 0 and counts.sum() == counts[: len(CLASSES)].sum() + counts[VOID]
    assert len(COLOURS) == len(CLASSES)


@pytest.mark.parametrize("size", [(32, 64), (48, 48), (65, 131)])
def test_scenes_of_any_size(size):
    image, label = scene(0, size)
    assert image.shape == (3, *size) and label.shape == size
    assert image.dtype == torch.float32 and label.dtype == torch.long
    assert 0 <= image.min() and image.max() <= 1


def test_index_errors():
    with pytest.raises(IndexError, match="scene 3 of 3"):
        StreetScenes(3)[3]


def test_too_few_scenes_are_refused(capsys):
    pytest.importorskip("rich")
    from inplace_abn.recipes.demo import main

    with pytest.raises(SystemExit):
        main(["--scenes", "3"])
    assert "at least 4 scenes" in capsys.readouterr().err


def test_metrics_count_by_hand():
    label = torch.tensor([0, 0, 1, 1, VOID, 2])
    prediction = torch.tensor([0, 1, 1, 1, 0, 0])
    counts = confusion(prediction, label, 4)
    assert counts.tolist() == [[1, 1, 0, 0], [0, 2, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]
    assert pixel_accuracy(counts) == pytest.approx(3 / 5)
    # Class 3 does not occur: the mean is over 1/3, 2/3 and 0.
    assert mean_iou(counts) == pytest.approx(1 / 3)


@pytest.mark.alone
def test_the_demonstration_trains_compares_and_draws(tmp_path, capsys):
    pytest.importorskip("rich")
    pytest.importorskip("matplotlib")
    from inplace_abn.recipes.demo import main

    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(2)
    plain, lean = main(["--steps", "12", "--scenes", "16", "--batch", "4", "--out", str(tmp_path), "--device", "cpu"])
    assert lean.kept <= 0.52 * plain.kept and lean.peak < plain.peak
    # The same function from the same weights: the first losses agree to rounding, and both fall.
    assert lean.losses[0] == pytest.approx(plain.losses[0], rel=1e-5)
    assert max(plain.losses[-1], lean.losses[-1]) < plain.losses[0]
    assert 0 < lean.accuracy < 1
    assert (tmp_path / "comparison.png").stat().st_size > 10_000
    assert (tmp_path / "comparison.csv").read_text().count("\n") == 3
    shown = capsys.readouterr().out
    assert "kept for backward" in shown and "comparison.png" in shown and f"{lean.kept / 2**20:.1f} MiB" in shown
