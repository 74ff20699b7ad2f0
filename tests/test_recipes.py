"""Data, losses, metrics, recipes and predictions, each against something simpler."""

from __future__ import annotations

import json
import math
import pickle
import random
import struct
import tracemalloc
import zlib
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from inplace_abn import ABN, models, outside
from inplace_abn.memory import LiveBytes
from inplace_abn.recipes import classes as known_classes
from inplace_abn.recipes import data, labelled, named, names, pixels, prediction, segmentation, sizing, storage, task_of
from inplace_abn.recipes.config import Config, from_dict, override, settings
from inplace_abn.recipes.data import Draw, Permuted
from inplace_abn.recipes.files import Paths, read_image, write_png
from inplace_abn.recipes.loop import train
from inplace_abn.recipes.losses import bootstrapped
from inplace_abn.recipes.metrics import confusion, ious, mean_iou, pixel_accuracy
from inplace_abn.recipes.scenes import CLASSES, COLOURS, KINDS, VOID, scene
from inplace_abn.recipes.segmentation import Segmentation, coloured, fused, predicted, tiled
from inplace_abn.recipes.small import Small

Image = pytest.importorskip("PIL.Image")
CPU = torch.device("cpu")

# Embedded data.


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
    labels = torch.stack([scene(i, seed=3)[1] for i in range(60)])
    counts = torch.bincount(labels.flatten(), minlength=VOID + 1)
    assert (counts[: len(CLASSES)] > 0.002 * labels.numel()).all()
    assert counts[VOID] > 0 and counts.sum() == counts[: len(CLASSES)].sum() + counts[VOID]
    assert len(COLOURS) == len(CLASSES)


def test_kinds_of_scenes_have_more_of_their_things():
    things = {"avenue": "vegetation", "signs": "pole", "crowd": "person", "traffic": "car"}
    share = {
        kind: torch.stack([torch.bincount(scene(i, kind=kind)[1].flatten(), minlength=256) for i in range(20)]).sum(0)
        for kind in KINDS
    }
    for kind, thing in things.items():
        column = {k: int(counts[CLASSES.index(thing)]) for k, counts in share.items()}
        assert max(column, key=column.get) == kind


@pytest.mark.parametrize("size", [(32, 64), (48, 48), (65, 131)])
def test_scenes_of_any_size(size):
    image, label = scene(0, size)
    assert image.shape == (3, *size) and label.shape == size
    assert image.dtype == torch.float32 and label.dtype == torch.long
    assert 0 <= image.min() and image.max() <= 1


# Metrics.


def test_metrics_count_by_hand():
    label = torch.tensor([0, 0, 1, 1, VOID, 2])
    prediction_ = torch.tensor([0, 1, 1, 1, 0, 0])
    counts = confusion(prediction_, label, 4)
    assert counts.tolist() == [[1, 1, 0, 0], [0, 2, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]
    assert pixel_accuracy(counts) == pytest.approx(3 / 5)
    assert ious(counts)[:3].tolist() == pytest.approx([1 / 3, 2 / 3, 0]) and ious(counts)[3].isnan()
    assert mean_iou(counts) == pytest.approx(1 / 3)


def test_mean_iou_is_that_of_torchmetrics():
    outside.torchvision()  # which torchmetrics imports, if it is there
    classification = pytest.importorskip("torchmetrics.classification")
    generator = torch.Generator().manual_seed(0)
    for classes in (2, 5, 19):
        for _ in range(20):
            label = torch.randint(classes, (2, 16, 16), generator=generator)
            guess = torch.where(torch.rand(label.shape, generator=generator) < 0.6, label, label.roll(1, 2))
            label = torch.where(torch.rand(label.shape, generator=generator) < 0.1, VOID, label)
            theirs = classification.MulticlassJaccardIndex(classes, average="none", ignore_index=VOID)(guess, label)
            mine = ious(confusion(guess.flatten(), label.flatten(), classes))
            # Classes that do not occur are 0 there.
            torch.testing.assert_close(mine.nan_to_num(0.0), theirs, rtol=0, atol=1e-6)
            assert mean_iou(confusion(guess.flatten(), label.flatten(), classes)) == pytest.approx(
                float(theirs[~mine.isnan()].mean()), abs=1e-6
            )


# The loss.


def plain_loss(logits, targets, hardest):
    wide = F.interpolate(logits, targets.shape[1:], mode="bilinear", align_corners=False)
    each = F.cross_entropy(wide, targets, ignore_index=VOID, reduction="none").flatten(1)
    return each.topk(math.ceil(hardest * each.shape[1])).values.mean()


# h, w, H, W: as in DeepLab, odd sides, one pixel, and no upsampling at all.
SIZES = [(8, 8, 64, 64), (6, 7, 33, 41), (1, 1, 9, 5), (5, 6, 5, 6)]


@pytest.mark.parametrize("hardest", [1.0, 0.25, 1e-9])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_loss_is_the_plain_one(size, hardest):
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(3, 5, *size[:2], dtype=torch.float64, generator=generator)
    targets = torch.randint(5, (3, *size[2:]), generator=generator)
    targets[torch.rand(targets.shape, generator=generator) < 0.2] = VOID
    targets[2] = VOID
    logits.requires_grad_()
    mine, theirs = bootstrapped(logits, targets, hardest), plain_loss(logits, targets, hardest)
    torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    got, want = (torch.autograd.grad(loss, logits)[0] for loss in (mine, theirs))
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
    assert not got[2].any()


def test_the_loss_passes_gradcheck_and_takes_labels_of_any_type():
    logits = torch.randn(2, 4, 3, 4, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(4, (2, 12, 16))
    assert torch.autograd.gradcheck(lambda x: bootstrapped(x, targets, 0.25), (logits,))
    same = bootstrapped(logits, targets.to(torch.uint8), 0.25)
    assert torch.equal(bootstrapped(logits, targets, 0.25), same)
    with pytest.raises(ValueError, match="a share of the pixels"):
        bootstrapped(logits, targets, 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_does_not_touch_the_loss(dtype):
    generator = torch.Generator().manual_seed(0)
    logits = (10 * torch.randn(2, 5, 4, 4, generator=generator)).requires_grad_()
    targets = torch.randint(5, (2, 32, 32), generator=generator)
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", dtype, enabled=enabled):
            loss = bootstrapped(logits, targets, 0.25)
            results.append((loss, torch.autograd.grad(loss, logits)[0]))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


def test_a_crop_of_void_has_no_loss_and_no_gradient():
    logits = torch.randn(2, 3, 4, 4, requires_grad=True)
    loss = bootstrapped(logits, torch.full((2, 32, 32), VOID), 0.25)
    loss.backward()
    assert loss.item() == 0 and not logits.grad.any()


def test_the_loss_never_holds_the_upsampled_logits():
    classes, crops, side = 65, 2, 128
    logits = torch.randn(crops, classes, side // 8, side // 8, requires_grad=True)
    targets = torch.randint(classes, (crops, side, side), dtype=torch.uint8)
    upsampled = 4 * crops * classes * side * side
    with LiveBytes() as live:
        live.know(logits, targets)
        bootstrapped(logits, targets, 0.25).backward()
    assert live.peak <= 1.5 * upsampled
    with LiveBytes() as plain:
        plain.know(logits, targets)
        plain_loss(logits, targets.long(), 0.25).backward()
    assert plain.peak >= 3 * upsampled
    # Measured: a few bands, and per pixel a handful of numbers.
    assert live.peak <= 0.75 * upsampled


# Images and labels on disk.


def png(path: Path, image) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_png(image, path)
    return path


def gray(path: Path, values, mode="L") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    height, width = values.shape
    image = Image.frombytes(mode, (width, height), values.to(torch.uint8).contiguous().numpy().tobytes())
    if mode == "P":
        image.putpalette([255 - i // 3 for i in range(768)])
    image.save(path)
    return path


def picture(seed=0, size=(20, 24)):
    return torch.randint(256, (3, *size), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def test_images_of_many_kinds_are_read(tmp_path):
    image = picture()
    assert torch.equal(read_image(png(tmp_path / "plain.png", image)), image)
    source = Image.open(tmp_path / "plain.png")
    for mode in ("CMYK", "L", "P", "RGBA", "LA", "1"):
        name = tmp_path / f"{mode}.{'jpg' if mode == 'CMYK' else 'png'}"
        source.convert(mode).save(name)
        assert read_image(name).shape == image.shape and read_image(name).dtype == torch.uint8
    # 16 bits, scaled to 8 rather than clipped.
    deep = torch.arange(0, 65536, 257).view(16, 16).to(torch.int32)
    Image.frombytes("I", (16, 16), deep.numpy().tobytes()).convert("I;16").save(tmp_path / "deep.png")
    assert torch.equal(read_image(tmp_path / "deep.png")[0], torch.arange(256).view(16, 16).to(torch.uint8))
    # Held upright by its metadata.
    exif = Image.Exif()
    exif[0x0112] = 6
    source.save(tmp_path / "turned.png", exif=exif)
    assert torch.equal(read_image(tmp_path / "turned.png"), image.rot90(-1, (1, 2)))
    source.save(tmp_path / "moving.gif", save_all=True, append_images=[source.rotate(90)])
    assert read_image(tmp_path / "moving.gif").shape == image.shape


def damaged(path: Path, kind: int) -> None:
    """Break an image file in one of many ways."""
    raw = path.read_bytes()
    chance = random.Random(kind)
    ways = [
        lambda: raw[: len(raw) // 2],
        lambda: raw[:20],
        lambda: b"",
        lambda: b"this is a text, not an image\n" * 30,
        lambda: b"\0" * len(raw),
        lambda: bytes(chance.randrange(256) for _ in range(len(raw))),
        lambda: raw[:8] + b"\xff" * 30 + raw[38:],
    ]
    path.write_bytes(ways[kind % len(ways)]())


@pytest.fixture
def folder(tmp_path):
    """An ImageFolder of three classes, whose images are of one colour each: the colour tells the class."""
    for split, count in (("train", 40), ("val", 6)):
        for label, name in enumerate(("ant", "bee", "cat")):
            for i in range(count):
                image = torch.full((3, 12, 14), 10 + 100 * label, dtype=torch.uint8)
                png(tmp_path / split / name / f"{i:03d}.png", image)
    return tmp_path


def imagenet(folder, *changes) -> Config:
    plain = ["data.resize=0", "data.crop=8", "data.evaluate_resize=0", "data.evaluate_crop=8", "data.cache=false"]
    plain += [
        "data.workers=0",
        "augment.pad=0",
        "augment.colour=0",
        "augment.lighting=0",
        "network.name=small",
        "train.dtype=float32",
    ]
    return override(named("imagenette"), [f"data.path={folder}", *plain, *changes])


def test_a_million_files_take_little_memory():
    def names():
        return (f"train/n{i // 1000:08d}/n{i // 1000:08d}_{i}.JPEG" for i in range(100_000))

    tracemalloc.start()
    try:
        paths, order = Paths(names()), Permuted(100_000, 0, 0)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Characters and an end each; bytes and arrays grow by an eighth at a time. Torch's indices are not Python's memory.
    assert held < 1.125 * sum(len(name) + 8 for name in names()) + 10_000  # and the objects themselves
    assert len(paths) == 100_000 and paths[-1] == "train/n00000099/n00000099_99999.JPEG"
    assert paths[7:10] == [*names()][7:10] and list(pickle.loads(pickle.dumps(paths)))[:3] == paths[:3]
    assert Paths(["ä", "", "b/c"])[:] == ["ä", "", "b/c"]
    with pytest.raises(IndexError):
        paths[100_000]
    assert order[5:9] == [order[i] for i in range(5, 9)] and sorted(d.sample for d in order[:]) == list(range(100_000))


def test_broken_files_are_replaced_and_labels_stay_right(folder, tmp_path):
    broken = {}
    for kind, path in enumerate(random.Random(0).sample(sorted((folder / "train").rglob("*.png")), 7)):
        damaged(path, kind)
        broken[str(path)] = kind
    for cache in ("true", "false"):
        samples = labelled.classification(imagenet(folder, f"data.cache={cache}"), "train")
        seen = {}
        for draw in samples.order(0, 0):
            image, label, problems = samples[draw]
            assert int(image.max()) == 10 + 100 * label
            seen.update(dict(problems))
        assert seen.keys() == broken.keys() and all(seen.values())
        # The same replacement each time.
        assert all(torch.equal(samples[d][0], samples[d][0]) for d in samples.order(0, 0)[:20])
    skipping = labelled.classification(imagenet(folder, "data.corrupt=skip"), "train")
    batch = data.collate([skipping[draw] for draw in skipping.order(0, 0)])
    assert len(batch.images) == 113 and len(batch.problems) == 7
    assert (batch.images.flatten(1).amax(1) == 10 + 100 * batch.targets).all()
    raising = labelled.classification(imagenet(folder, "data.corrupt=raise"), "train")
    with pytest.raises(OSError, match="cannot be read: .*data.corrupt=replace"):
        [raising[draw] for draw in raising.order(0, 0)]


def test_an_epoch_with_broken_files_completes_and_lists_them_once(folder, tmp_path):
    paths = sorted((folder / "train").rglob("*.png"))[::25]
    for kind, path in enumerate(paths):
        damaged(path, kind)
    config = imagenet(folder, "train.epochs=3", "train.batch=16", "train.log_every=2", "data.corrupt_share=0.1")
    said = []
    train(config, task_of(config), tmp_path / "run", device=CPU, tell=said.append)
    listed = [line["bad_file"] for line in storage.lines(tmp_path / "run") if "bad_file" in line]
    assert sorted(listed) == sorted(map(str, paths)) and len(said) > len(listed)
    assert sum("cannot read" in line for line in said) == len(paths)
    strict = override(config, ["data.corrupt_share=0.01"])
    with pytest.raises(OSError, match=r"more than data.corrupt_share=0.01; is the data set whole"):
        train(strict, task_of(strict), tmp_path / "strict", device=CPU, tell=said.append)


def test_broken_files_of_an_evaluation_are_listed_and_left_out(folder, tmp_path):
    config = imagenet(folder, "train.epochs=1", "train.batch=17", "data.corrupt_share=0.1")
    # The last one, alone in its batch.
    damaged(sorted((folder / "val" / "cat").iterdir())[-1], 0)
    said = []
    scores = train(config, task_of(config), tmp_path / "run", device=CPU, tell=said.append)
    assert sum("cannot read" in line and "cat" in line for line in said) == 1
    assert round(scores["top1"] * 17, 6) % 1 == 0
    for path in (folder / "val" / "bee").iterdir():
        damaged(path, 0)
    with pytest.raises(OSError, match="7 of 18 files to evaluate cannot be read"):
        train(config, task_of(config), tmp_path / "run", device=CPU, tell=said.append, resume=True)


def test_the_part_that_is_evaluated_is_chosen(folder):
    (folder / "val").rename(folder / "test")
    assert len(labelled.classification(imagenet(folder, "data.validation=test"), "val")) == 18
    with pytest.raises(ValueError, match="no folders of classes in .*val"):
        labelled.classification(imagenet(folder), "val")


def test_decoding_leaves_the_filters_of_warnings_alone(folder):
    import warnings

    before = list(warnings.filters)
    labelled.classification(imagenet(folder, "data.cache=true"), "train")
    assert warnings.filters == before


def test_a_bomb_is_refused(tmp_path):
    # 40,000 by 40,000 pixels of nothing in a few kilobytes.
    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", 40000, 40000, 8, 2, 0, 0, 0))
    bomb = tmp_path / "bomb.png"
    bomb.write_bytes(b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(b"\0" * 10000)) + chunk(b"IEND", b""))
    with pytest.raises(ValueError, match="DecompressionBomb"):
        read_image(bomb)


def test_views_of_an_evaluation(folder):
    config = imagenet(folder)
    centre = labelled.classification(config, "val")
    assert centre[Draw(0, 0)][0].shape == (3, 8, 8)
    tens = labelled.classification(override(config, ["data.evaluate_resize=12"]), "val", "ten")
    views = tens[Draw(0, 0)][0]
    assert views.shape == (10, 3, 8, 8) and torch.equal(views[5], views[0].flip(-1))
    assert labelled.classification(config, "val", "320")[Draw(0, 0)][0].shape == (3, 320, 320)
    with pytest.raises(ValueError, match="one of: centre, ten, 320"):
        task_of(config, "nine")


def test_idx_files(tmp_path):
    import gzip

    for stem, count in (("train", 20), ("t10k", 5)):
        images = torch.arange(count, dtype=torch.uint8).view(-1, 1, 1).expand(-1, 28, 28).contiguous()
        head = b"\0\0\x08\x03" + struct.pack(">III", count, 28, 28)
        (tmp_path / f"{stem}-images-idx3-ubyte.gz").write_bytes(gzip.compress(head + images.numpy().tobytes()))
        labels = b"\0\0\x08\x01" + struct.pack(">I", count) + bytes(i % 10 for i in range(count))
        (tmp_path / f"{stem}-labels-idx1-ubyte").write_bytes(labels)
    config = override(named("fashion-mnist"), [f"data.path={tmp_path}"])
    samples = labelled.classification(config, "train")
    image, label, _ = samples[Draw(13, 0)]
    assert len(samples) == 20 and image.shape == (3, 32, 32) and label == 3 and int(image.max()) == 13
    assert labelled.classification(config, "val")[Draw(4, 0)][0].shape == (3, 32, 32)
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(b"\0\0\x08\x01" + struct.pack(">I", 7) + b"\1\2")
    with pytest.raises(ValueError, match="says .7,. but holds 2 bytes"):
        labelled.classification(config, "val")


# Pixels.


def pairs(root: Path, classes=3, size=(20, 24), count=4, part="train"):
    (root / "classes.json").write_text(
        json.dumps({"classes": [{"name": f"class {i}", "colour": [i, 2 * i, 200]} for i in range(classes)]})
    )
    for i in range(count):
        png(root / part / "images" / f"{i}.png", picture(i, size))
        label = torch.randint(classes, size, generator=torch.Generator().manual_seed(i))
        label[:2] = VOID
        gray(root / part / "labels" / f"{i}.png", label)


# Images as they are, in small crops.
PLAIN = ["data.resize=0", "data.evaluate_resize=0", "data.crop=16", "data.cache=false", "augment.colour=0"]


def config_of(root: Path, kind="pairs", *changes) -> Config:
    return override(named("camvid"), [f"data.kind={kind}", f"data.path={root}", *PLAIN, *changes])


def read_all(root: Path, kind="pairs", *changes, split="train"):
    samples = pixels.segmentation(config_of(root, kind, *changes), split)
    return [samples[draw] for draw in samples.order(0, 0)]


def test_pairs_are_read_whole_and_cropped(tmp_path):
    pairs(tmp_path)
    pairs(tmp_path, part="val")
    for image, label, problems in read_all(tmp_path):
        assert image.shape == (3, 16, 16) and label.shape == (16, 16) and not problems
        assert set(label.unique().tolist()) <= {0, 1, 2, VOID}
    whole = read_all(tmp_path, split="val")
    assert torch.equal(whole[1][0], picture(1)) and whole[1][1].shape == (20, 24)


def test_crops_scale_flip_and_pad(tmp_path):
    pairs(tmp_path, size=(10, 40), count=1)
    samples = pixels.segmentation(config_of(tmp_path, "pairs", "augment.scale_low=1", "augment.scale_high=1"), "train")
    image, label = picture(0, (10, 40)), samples.read(0)[1]
    mean = (255 * torch.tensor(samples.config.data.mean)).round().to(torch.uint8)
    places, flips = set(), set()
    for seed in range(60):
        crop, labels, _ = samples[Draw(0, seed)]
        rows = (crop != mean.view(3, 1, 1)).any(0).any(1).nonzero().flatten()
        top = int(rows[0])
        assert len(rows) == 10 and (labels[:top] == VOID).all() and (labels[top + 10 :] == VOID).all()
        for flipped in (False, True):
            seen = crop.flip(2) if flipped else crop
            for left in range(25):
                if torch.equal(seen[:, top : top + 10], image[:, :, left : left + 16]):
                    known = labels.flip(1) if flipped else labels
                    assert torch.equal(known[top : top + 10], label[:, left : left + 16])
                    places.add((top, left))
                    flips.add(flipped)
    assert flips == {False, True} and len(places) > 30
    assert {top for top, _ in places} == set(range(7)) and {left for _, left in places} >= {0, 24}
    larger = pixels.segmentation(config_of(tmp_path, "pairs", "augment.scale_low=2", "augment.scale_high=2"), "train")
    assert all(larger[Draw(0, seed)][1].shape == (16, 16) for seed in range(10))


def test_images_are_resized_and_results_keep_the_labels_size(tmp_path):
    for part in ("train", "val"):
        pairs(tmp_path, part=part)
    twice = [
        "data.resize=40",
        "data.evaluate_resize=40",
        "augment.scale_low=1",
        "augment.scale_high=1",
        "augment.flip=0",
    ]
    samples = pixels.segmentation(config_of(tmp_path, "pairs", *twice), "train")
    whole, label = picture(0), samples.read(0)[1]
    larger = pixels.resampled(whole, (40, 48))
    for seed in range(5):
        crop, labels, _ = samples[Draw(0, seed)]
        # A window of 8 pixels, enlarged to 16: inside of its border it is that of the enlarged image.
        at = [
            (t, s) for t in range(13) for s in range(17) if torch.equal(labels[::2, ::2], label[t : t + 8, s : s + 8])
        ]
        assert any(
            torch.equal(crop[:, 2:-2, 2:-2], larger[:, 2 * t + 2 : 2 * t + 14, 2 * s + 2 : 2 * s + 14]) for t, s in at
        )
    val = pixels.segmentation(config_of(tmp_path, "pairs", *twice), "val")
    image, label, _ = val[val.order(0, 0)[0]]
    assert torch.equal(image, larger) and label.shape == (20, 24)
    shown = Segmentation().picture(val, lambda images: torch.zeros(1, 3, images.shape[2] // 2, images.shape[3] // 2))
    assert shown.shape == (3, 4 * 20, 3 * 24)


def test_crops_are_recoloured_and_their_labels_are_not(tmp_path):
    pairs(tmp_path)
    plain, coloured = (
        pixels.segmentation(config_of(tmp_path, "pairs", f"augment.colour={c}", f"augment.lighting={c}"), "train")
        for c in (0, 0.4)
    )
    for seed in range(5):
        (image, label, _), (other, same, _) = plain[Draw(0, seed)], coloured[Draw(0, seed)]
        assert torch.equal(label, same) and not torch.equal(image, other) and other.dtype == torch.uint8


def test_class_uniform_sampling_lifts_rare_classes(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    embedded = override(named("embedded-segment"), ["data.length=80", "data.resize=48", "data.crop=16"])
    shares = {}
    for uniform in ("false", "true"):
        samples = pixels.segmentation(override(embedded, [f"data.uniform={uniform}"]), "train")
        draws = samples.order(0, 0)
        assert len(draws) == 80
        if uniform == "true":
            drawn = torch.bincount(torch.tensor([draw.wanted for draw in draws]), minlength=len(CLASSES))
            # 80 draws of 8 classes: 10 each, give or take four deviations.
            assert (drawn > 0).all() and drawn.max() <= 10 + 4 * 3
            assert all((samples.read(draw.sample)[1] == draw.wanted).any() for draw in draws)
            hits = sum(bool((samples[draw][1] == draw.wanted).any()) for draw in draws)
            # Nearest-neighbour scaling may lose a single pixel.
            assert hits >= 76
        labels = torch.stack([samples[draw][1] for draw in draws])
        counts = torch.bincount(labels.flatten().long(), minlength=256)[: len(CLASSES)]
        shares[uniform] = counts / counts.sum()
    rare = shares["false"].argsort()[:2]
    assert (shares["true"][rare] > 1.3 * shares["false"][rare]).all()
    # Kept for the next time: reading nothing gives the same index.
    kept = list((tmp_path / "inplace_abn").glob("classes-*.json"))
    assert len(kept) == 1 and len(json.loads(kept[0].read_text())) == len(CLASSES)


def cityscapes(root: Path, part="train"):
    name = "aachen_000000_000019"
    png(root / "leftImg8bit" / part / "aachen" / f"{name}_leftImg8bit.png", picture())
    values = (torch.arange(20 * 24) % 34).view(20, 24)
    gray(root / "gtFine" / part / "aachen" / f"{name}_gtFine_labelIds.png", values)
    return values


def test_cityscapes(tmp_path):
    values = cityscapes(tmp_path, "val")
    ((_, label, _),) = read_all(tmp_path, "cityscapes", split="val")
    assert set(label.unique().tolist()) == {*range(19), VOID}
    assert (label[values == 7] == 0).all() and (label[values == 33] == 18).all() and (label[values == 0] == VOID).all()
    assert known_classes.CITYSCAPES.names[13] == "car" and (label[values == 26] == 13).all()


def test_coco_stuff(tmp_path):
    values = (torch.arange(20 * 24) % 184).view(20, 24)
    png(tmp_path / "val2017" / "1.jpg", picture())
    png(tmp_path / "val2017" / "2.jpg", picture())
    gray(tmp_path / "stuff_val2017_pixelmaps" / "1.png", values)
    ((_, label, _),) = read_all(tmp_path, "coco-stuff", split="val")
    assert (label[values == 92] == 0).all() and (label[values == 182] == 90).all()
    assert (label[values < 92] == VOID).all() and (label[values == 183] == VOID).all()
    names_ = known_classes.COCO_STUFF.names
    assert len(names_) == 91 and (names_[0], names_[90]) == ("banner", "wood") and list(names_) == sorted(names_)
    (tmp_path / "val.txt").write_text("1\n2\n")
    with pytest.raises(ValueError, match=r"1 files are missing: .*2.png"):
        read_all(tmp_path, "coco-stuff", split="val")
    (tmp_path / "val.txt").write_text("../val2017/1\n")
    with pytest.raises(ValueError, match="not the name of a file"):
        read_all(tmp_path, "coco-stuff", split="val")


def vistas_config(root: Path, count=4) -> None:
    labels = [{"readable": f"thing {i}", "color": [i, i, i], "evaluate": True} for i in range(count)]
    labels.append({"readable": "Unlabeled", "color": [0, 0, 0], "evaluate": False})
    (root / "config.json").write_text(json.dumps({"labels": labels}))


def test_vistas(tmp_path):
    vistas_config(tmp_path)
    png(tmp_path / "validation" / "images" / "a.jpg", picture())
    values = (torch.arange(20 * 24) % 5).view(20, 24)
    gray(tmp_path / "validation" / "labels" / "a.png", values, "P")
    ((_, label, _),) = read_all(tmp_path, "vistas", split="val")
    assert torch.equal(label, torch.where(values == 4, VOID, values).to(torch.uint8))


def _without(path):
    return lambda root: (root / path).unlink()


def _wrong(path, **options):
    def break_it(root):
        values = torch.zeros(options.get("size", (20, 24)), dtype=torch.uint8)
        values[3, 4] = options.get("value", 0)
        gray(root / path, values, options.get("mode", "L"))

    return break_it


def _json(text):
    return lambda root: (root / "classes.json").write_text(text)


L0, I0 = "train/labels/0.png", "train/images/0.png"
# Twenty ways in which a data set is wrong, and what is said of each.
FAULTS = {
    "label-missing": (_without(L0), r"1 files have no partner in .*labels: .*0.png"),
    "image-missing": (_without(I0), r"1 files have no partner in .*images: .*0.png"),
    "label-size": (_wrong(L0, size=(21, 24)), r"0.png has 24×20 pixels, but its label .* 24×21"),
    "label-transposed": (_wrong(L0, size=(24, 20)), r"has 24×20 pixels, but its label .* 20×24"),
    "value-one-too-many": (_wrong(L0, value=3), r"0.png has pixels of value 3, .* counted from 1"),
    "value-outside": (_wrong(L0, value=77), r"0.png has pixels of value 77, which is none of its 3 classes"),
    "value-254": (_wrong(L0, value=254), "pixels of value 254"),
    "colours-for-labels": (lambda root: png(root / L0, picture()), "mode RGB; labels have one channel"),
    "label-truncated": (lambda root: damaged(root / L0, 0), "cannot be read"),
    "label-a-text": (lambda root: damaged(root / L0, 3), "cannot be read"),
    "image-truncated": (lambda root: damaged(root / I0, 0), "cannot be read"),
    "image-empty": (lambda root: damaged(root / I0, 2), "cannot be read"),
    "no-classes": (_without("classes.json"), "classes.json is missing; it says"),
    "classes-broken": (_json("{"), "cannot be understood: JSONDecodeError"),
    "classes-empty": (_json('{"classes": []}'), "has 0 classes"),
    "classes-without-names": (_json('{"classes": [{"colour": [1, 2, 3]}]}'), "cannot be understood: KeyError"),
    "classes-not-a-list": (_json('{"classes": 3}'), "cannot be understood: TypeError"),
    "colour-of-two": (_json('{"classes": [{"name": "a", "colour": [1, 2]}]}'), "a colour is three numbers"),
    "void-is-a-class": (_json('{"classes": [{"name": "a"}], "void": [0]}'), "are values of classes"),
    "no-split": (lambda root: (root / "train").rename(root / "training"), "no images in .*train/images"),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_faults_of_data_sets_are_named(fault, tmp_path):
    assert len(FAULTS) == 20
    pairs(tmp_path)
    break_it, said = fault
    break_it(tmp_path)
    with pytest.raises((ValueError, OSError), match=said):
        read_all(tmp_path, "pairs", "data.corrupt=raise")


def test_folders_inside_of_folders_are_kept_apart(tmp_path):
    pairs(tmp_path, count=1)
    for part in ("a", "b"):
        png(tmp_path / "train" / "images" / part / "x.png", picture(ord(part)))
    gray(tmp_path / "train" / "labels" / "a" / "x.png", torch.zeros(20, 24))
    with pytest.raises(ValueError, match=r"1 files have no partner .*images/b/x.png"):
        read_all(tmp_path)
    gray(tmp_path / "train" / "labels" / "b" / "x.png", torch.ones(20, 24))
    samples = pixels.segmentation(config_of(tmp_path), "train")
    assert [Path(name).parent.name for name in samples.names] == ["images", "a", "b"]
    assert torch.equal(samples.read(2)[0], picture(ord("b"))) and (samples.read(2)[1] == 1).all()
    png(tmp_path / "train" / "images" / "0.bmp", picture())
    with pytest.raises(ValueError, match="differ in their suffix alone"):
        read_all(tmp_path)


def test_images_of_different_sizes_are_evaluated_one_by_one(tmp_path):
    pairs(tmp_path, size=(16, 16))
    pairs(tmp_path, part="val", count=2)
    png(tmp_path / "val" / "images" / "2.png", picture(2, (30, 18)))
    gray(tmp_path / "val" / "labels" / "2.png", torch.zeros(30, 18))
    config = config_of(tmp_path, "pairs", "network.name=small", "train.batch=2", "train.epochs=1", "data.workers=0")
    scores = train(config, task_of(config), tmp_path / "run", device=CPU, tell=lambda line: None)
    assert 0 <= scores["miou"] <= 1 and set(scores) >= {"iou/class 0", "pixel_accuracy"}
    assert read_image(tmp_path / "run" / "predictions.png").shape == (3, 20 + 20 + 30, 3 * 24)


def test_data_sets_travel_to_workers_that_are_not_forked(folder, tmp_path):
    import pickle

    (tmp_path / "pairs").mkdir()
    pairs(tmp_path / "pairs")
    sets = [labelled.classification(imagenet(folder, "augment.lighting=0.1"), split) for split in ("train", "val")]
    sets.append(labelled.classification(imagenet(folder, "data.evaluate_resize=12"), "val", "ten"))
    sets.append(labelled.classification(named("embedded-classify"), "val"))
    sets.append(pixels.segmentation(config_of(tmp_path / "pairs"), "train"))
    sets.append(pixels.segmentation(named("embedded-segment"), "val"))
    for samples in sets:
        draw = samples.order(0, 0)[1]
        assert torch.equal(pickle.loads(pickle.dumps(samples))[draw][0], samples[draw][0])


# Predictions.


def test_fusion_of_views():
    views = [torch.tensor(p).view(1, 3, 1, 1) for p in ((0.5, 0.3, 0.2), (0.5, 0.3, 0.2), (0.0, 0.97, 0.03))]
    by = {fusion: fused(views, fusion) for fusion in ("mean", "voting", "max")}
    assert [int(by[f][0]) for f in ("mean", "voting", "max")] == [1, 0, 1]
    assert float(by["mean"][1]) == pytest.approx(1.57 / 3) and float(by["max"][1]) == pytest.approx(0.97)
    # Votes that are equal are decided by what was sure.
    assert int(fused([views[0], views[2]], "voting")[0]) == 1
    with pytest.raises(ValueError, match="one of: mean, voting, max"):
        fused(views, "median")


# Of the small network's outputs when convolutions add in another order: 288 terms, nine layers, each at its worst.
ROUNDING = 9 * 288**0.5 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("size", [(96, 160), (75, 141)])
@torch.no_grad()
def test_tiles_agree_with_the_whole_in_the_interior(size):
    torch.manual_seed(0)
    net = Small(4, ABN, pixels=True).eval()
    x = torch.randn(1, 3, *size)
    whole = net(x)
    # It sees 2·(1+1+2+2+4+4+8+1)+2 pixels away.
    torch.testing.assert_close(tiled(net, x, 32, 48), whole, rtol=0, atol=ROUNDING * float(whole.abs().max()))


@torch.no_grad()
def test_images_too_large_for_the_memory_are_cut_into_tiles():
    torch.manual_seed(0)
    net, x, said = Small(4, ABN, pixels=True).eval(), torch.randn(1, 3, 100, 520), list[str]()

    class Limited(torch.nn.Module):
        most = 0

        def forward(self, x):
            if x.shape[3] > self.most:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return net(x)

    limited, task = Limited(), Segmentation()
    limited.most = 400
    whole = net(x)
    for _ in range(2):
        got = task.output(limited, x, said.append)
        torch.testing.assert_close(got, whole, rtol=0, atol=ROUNDING * float(whole.abs().max()))
    tiles = (192, 128)
    assert said == [f"images of 520×100 pixels do not fit into the memory: in tiles of {t}² now" for t in tiles]
    limited.most = 10
    with pytest.raises(torch.OutOfMemoryError):
        task.output(limited, x, said.append)
    assert task.tile == 64
    # Margins included, tiles would not be smaller than this.
    with pytest.raises(torch.OutOfMemoryError):
        Segmentation().output(limited, x[:, :, :, :300], said.append)


@torch.no_grad()
def test_batches_too_large_for_the_memory_are_shared_out_first():
    torch.manual_seed(0)
    net, x = Small(4, ABN, pixels=True).eval(), torch.randn(5, 3, 40, 600)

    class Limited(torch.nn.Module):
        def forward(self, x):
            if len(x) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return net(x)

    said, task, whole = list[str](), Segmentation(), net(x)
    got = task.output(Limited(), x, said.append)
    torch.testing.assert_close(got, whole, rtol=0, atol=ROUNDING * float(whole.abs().max()))
    assert not said and not task.tile


@torch.no_grad()
@pytest.mark.parametrize("size", [(204, 204), (100, 300), (256, 131)])
@pytest.mark.parametrize("name, stride", [("densenet121", 8), ("resnet18", 8), ("resnet18", 16)])
def test_tiles_make_a_map_of_the_right_size(name, stride, size):
    """Some networks round the sides of their maps up, some down."""
    torch.manual_seed(0)
    net, x = models.deeplabv3(name, 3, ABN, stride, upsample=False).eval(), torch.randn(1, 3, *size)
    assert tiled(net, x, 64, 64).shape == net(x).shape


def test_a_mirrored_view_of_a_mirrored_image_is_the_same():
    torch.manual_seed(0)
    net = Small(4, ABN, pixels=True).eval()
    x = torch.randn(1, 3, 32, 48)
    one, other = (predicted(net, v, (0.5, 1.0), flip=True) for v in (x, x.flip(3)))
    torch.testing.assert_close(one[1], other[1].flip(2), rtol=0, atol=ROUNDING)


@torch.no_grad()
def test_an_evaluation_of_several_views_decides_as_a_prediction_does():
    torch.manual_seed(0)
    net, x = Small(4, ABN, pixels=True).eval(), torch.randn(2, 3, 32, 48)
    classes, sure = predicted(net, x, (0.5, 1.0), flip=True)
    task = Segmentation(scales=(0.5, 1.0), flip=True)
    output = task.output(net, x, print)
    torch.testing.assert_close(output.max(1).values, sure, rtol=0, atol=ROUNDING)
    counts = task.counts(output, classes, 4)
    assert torch.equal(counts, torch.diag(classes.flatten().bincount(minlength=4)))


def test_colours():
    shown = coloured(torch.tensor([[0, 1, VOID]]), known_classes.CITYSCAPES)
    assert shown.permute(1, 2, 0).tolist() == [[[128, 64, 128], [244, 35, 232], [0, 0, 0]]]


# Configs.


def test_settings_are_changed_by_name_and_wrong_ones_are_named():
    config = named("imagenette")
    changed = override(config, ["optim.lr=0.05", "data.cache=no", "data.mean=0.5,0.5,0.5", "train.seed=-3"])
    assert (changed.optim.lr, changed.data.cache, changed.data.mean, changed.train.seed) == (
        0.05,
        False,
        (0.5,) * 3,
        -3,
    )
    assert from_dict(json.loads(json.dumps(changed.to_dict()))) == changed
    for wrong, said in {
        "optim.lrr=1": "'optim.lrr' is unknown; names: network.name",
        "optim.lr": "not written NAME=VALUE",
        "optim.lr=fast": "optim.lr is 'fast'; it must be of type float",
        "optim.lr=nan": "must be finite",
        "train.batch=1.5": "of type int",
        "train.batch=0": "must be positive",
        "optim.weight_decay=-1": "must not be negative",
        "data.cache=maybe": "true or false",
        "network.norm=group": "one of: standard, inplace, inplace-1, sync",
        "network.name=resnet19": "one of: small, densenet121",
        "data.mean=a,b": "numbers with commas",
        "data.mean=1": "have 3 numbers",
        "loss.hardest=2": "at most 1",
        "network.output_stride=4": "8 or 16",
        "augment.scale_low=3": "at most augment.scale_high",
    }.items():
        with pytest.raises(ValueError, match=said):
            override(config, [wrong])
    with pytest.raises(ValueError, match="has format 1, in which settings mean something else; this version reads 2"):
        from_dict({k: v for k, v in config.to_dict().items() if k != "format"})
    plain = config.to_dict()
    del plain["optim"]["lr"]
    with pytest.raises(ValueError, match=r"lacks \['lr'\]"):
        from_dict(plain)


def test_every_setting_is_explained_and_every_recipe_is_whole():
    for name in names():
        config = named(name)
        assert config.recipe == name and from_dict(config.to_dict()) == config
        assert all(text for _, text in settings(config).values())
    with pytest.raises(ValueError, match="one of: resnext101-stdbn-relu-256"):
        named("resnext")


def test_the_papers_classification_rows():
    for name, network, norm, activation, batch in [
        ("resnext101-stdbn-relu-256", "resnext101", "standard", "relu", 256),
        ("resnext101-stdbn-256", "resnext101", "standard", "leaky_relu", 256),
        ("resnext101-inplace-512", "resnext101", "inplace", "leaky_relu", 512),
        ("resnext152-inplace-256", "resnext152", "inplace", "leaky_relu", 256),
        ("wide-resnet38-inplace-256", "wide_resnet38", "inplace", "leaky_relu", 256),
        ("resnext101-sync-256", "resnext101", "sync", "leaky_relu", 256),
    ]:
        c = named(name)
        assert (c.network.name, c.network.norm, c.network.activation, c.network.activation_param) == (
            *(network, norm, activation),
            0.01,
        )
        assert (c.train.batch, c.train.epochs, c.train.world_size, c.optim.lr, c.optim.momentum) == (
            batch,
            90,
            4,
            0.1,
            0.9,
        )
        assert c.optim.nesterov and c.optim.weight_decay == 1e-4 and c.optim.decay == "all"
        assert c.optim.clip == c.optim.ema == 0
        wide = network.startswith("wide")
        assert (c.optim.schedule, c.optim.final_lr) == (("linear", 1e-6) if wide else ("step", 0.0))
        assert (c.optim.drop_every, c.optim.drop) == (30, 0.1)
        assert (c.data.resize, c.data.crop, c.augment.crop) == (256, 224, "plain")
        assert c.augment.flip and c.augment.colour == 0.4 and c.augment.lighting == 0.1


def test_the_papers_segmentation_cells():
    cells = {
        "cityscapes": "resnext101 standard 16x512 inplace 28x512 inplace 16x672 sync 16x672 "
        "wide-resnet38 standard 20x512 inplace 28x512 inplace 20x640 sync 20x640",
        "coco-stuff": "resnext101 standard 16x480 inplace 24x480 inplace 16x600 sync 16x600 "
        "wide-resnet38 standard 20x496 inplace 28x496 inplace 20x576 sync 20x576",
    }
    expected = [
        "cityscapes-resnext152-sync-12x680",
        "cityscapes-wide-resnet38-inplace-16x712",
        "cityscapes-wide-resnet38-sync-16x712",
        "cityscapes-wide-resnet38-sync-12x872",
        "cityscapes-wide-resnet38-sync-12x872-uniform",
        "vistas-wide-resnet38-sync-12x776-uniform",
    ]
    for kind, words in cells.items():
        network = norm = ""
        for word in words.split():
            if word.startswith(("resnext", "wide")):
                network = word
            elif "x" in word and word[0].isdigit():
                expected.append(f"{kind}-{network}-{norm}-{word}")
            else:
                norm = word
    table = [name for name in names() if name.startswith(("cityscapes", "coco", "vistas"))]
    assert sorted(table) == sorted(expected)
    for name in table:
        c = named(name)
        crops, _, side = name.removesuffix("-uniform").split("-")[-1].partition("x")
        assert (c.train.batch, c.data.crop, c.train.world_size) == (int(crops), int(side), 4)
        assert c.data.uniform == name.endswith("uniform") and c.network.norm in name and c.data.kind in name
        assert c.optim.lr == (3.5e-3 if "vistas" in name else 2.5e-3) and not c.optim.nesterov
        assert (c.optim.schedule, c.optim.power, c.optim.weight_decay, c.optim.momentum) == ("poly", 0.9, 1e-4, 0.9)
        assert c.train.epochs == {"city": 360, "coco": 30, "vist": 90}[name[:4]]
        assert (c.loss.hardest, c.network.output_stride) == (0.25, 8)
        assert (c.augment.scale_low, c.augment.scale_high, c.augment.flip) == (0.7, 2.0, True)


# The memory of a run.


def test_what_fits_and_what_would():
    config = override(named("embedded-classify"), ["network.norm=standard", "train.batch=64"])
    task = task_of(config)
    standard, in_place = (sizing.peaks(c, task, 4) for c in (config, override(config, ["network.norm=inplace"])))
    # One map of two is gone, and gradients of maps stay.
    assert standard(32) < standard(64) and in_place(64) < 0.75 * standard(64)
    table = [line.split("  ") for line in sizing.advice(config, task, 4, standard(64), 1).splitlines()]
    rows = {row[0]: [cell.strip() for cell in row[1:] if cell.strip()] for row in table}
    assert rows["as it is"][2] == "does not fit" and rows["network.norm=inplace"][2] == "fits"
    most = {name: int(rows[name][3]) for name in ("as it is", "network.norm=inplace")}
    usable = 0.92 * standard(64)
    assert standard(most["as it is"]) <= usable < standard(most["as it is"] + 1)
    assert in_place(most["network.norm=inplace"]) <= usable < in_place(most["network.norm=inplace"] + 2)
    assert {"network.norm=inplace train.dtype=bfloat16", "train.accumulate=2"} <= rows.keys()


# The demonstration.


def test_too_few_scenes_are_refused(capsys):
    from inplace_abn.recipes.demo import main

    with pytest.raises(SystemExit):
        main(["--scenes", "3"])
    assert "at least 4 scenes" in capsys.readouterr().err


def test_the_demonstration_trains_compares_and_draws(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    from inplace_abn.recipes.demo import main

    runs = main(
        ["--epochs", "2", "--scenes", "8", "--batch", "4", "--height", "32", "--device", "cpu", "--out", str(tmp_path)]
    )
    assert runs[1].kept <= 0.52 * runs[0].kept and runs[1].peak < runs[0].peak
    # The same training, to rounding.
    assert runs[0].losses == pytest.approx(runs[1].losses, rel=1e-2)
    assert (tmp_path / "comparison.png").stat().st_size > 10_000
    assert "InPlaceABN" in (tmp_path / "comparison.csv").read_text()
    assert "kept for backward" in capsys.readouterr().out


# From training to files of labels.


def test_segmentation_from_training_to_prediction(tmp_path, capsys, monkeypatch):
    from inplace_abn.cli import main

    folder = tmp_path / "run"
    small = ["data.length=8", "data.resize=16", "data.crop=16", "train.batch=4", "train.epochs=1", "train.log_every=1"]
    changes = [part for change in small for part in ("--set", change)]
    assert main(["train", "embedded-segment", "--device", "cpu", "--out", str(folder), *changes]) == 0
    sheet = read_image(folder / "predictions.png")
    assert sheet.shape == (3, 16 * 2, 32 * 3)
    scores = tmp_path / "scores.json"
    assert main(["evaluate", str(folder), "--device", "cpu", "--json", str(scores)]) == 0
    logged = storage.lines(folder)[-1]
    assert json.loads(scores.read_text())["miou"] == logged["miou"] and (folder / "evaluation.png").exists()
    looked, views = [], segmentation.views
    with monkeypatch.context() as spied:
        spied.setattr(segmentation, "views", lambda *given: looked.append(given[2:]) or views(*given))
        assert main(["evaluate", str(folder), "--device", "cpu", "--scales", "0.5,1,2", "--flip"]) == 0
    # Two images to score, and both once more for the picture.
    assert looked == 4 * [((0.5, 1.0, 2.0), True)]
    assert main(["evaluate", str(folder), "--device", "cpu", "--view", "ten"]) == 1
    for i in range(2):
        png(tmp_path / "images" / f"{i}.png", picture(i, (20, 30)))
    out = tmp_path / "out"
    options = ["--scales", "0.5,1", "--flip", "--fusion", "voting", "--device", "cpu"]
    assert main(["predict", str(folder), str(tmp_path / "images"), str(out), *options]) == 0
    with Image.open(out / "0.png") as palette:
        assert palette.mode == "P" and palette.size == (30, 20)
        assert tuple(palette.getpalette()[:3]) == COLOURS[0]
        ids = torch.frombuffer(bytearray(palette.tobytes()), dtype=torch.uint8)
    assert main(["predict", str(folder), str(tmp_path / "images"), str(out), *options, "--output", "prob"]) == 0
    with Image.open(out / "0.png") as raw, Image.open(out / "0_prob.png") as sure:
        assert raw.mode == sure.mode == "L"
        assert torch.equal(torch.frombuffer(bytearray(raw.tobytes()), dtype=torch.uint8), ids)
        assert min(sure.getextrema()) >= 255 // len(CLASSES)
    images = str(tmp_path / "images")
    with monkeypatch.context() as second:
        # One of two processes that torchrun started.
        second.setenv("WORLD_SIZE", "2")
        second.setenv("RANK", "1")
        assert main(["predict", str(folder), images, str(tmp_path / "share"), *options]) == 0
        assert [path.name for path in (tmp_path / "share").iterdir()] == ["1.png"]
        so_far = capsys.readouterr()
        assert "1 of 2 predictions" in so_far.out
        # Left over from elsewhere: this is one process.
        second.delenv("WORLD_SIZE")
        assert main(["predict", str(folder), images, str(tmp_path / "alone"), *options]) == 0
        assert len(list((tmp_path / "alone").iterdir())) == 2
    assert main(["predict", str(folder), images, images]) == 1
    assert torch.equal(read_image(tmp_path / "images" / "0.png"), picture(0, (20, 30)))
    png(tmp_path / "images" / "0.bmp", picture())
    assert main(["predict", str(folder), images, str(out)]) == 1
    damaged(tmp_path / "images" / "1.png", 0)
    (tmp_path / "images" / "0.bmp").unlink()
    assert main(["predict", str(folder), images, str(out)]) == 1
    said = so_far.err + capsys.readouterr().err
    assert "holds the images themselves" in said and "the same name: 0" in said and "1.png cannot be read" in said
    assert "view 'ten' is of classification" in said


def test_the_released_vistas_network_predicts(tmp_path, monkeypatch):
    from inplace_abn import checkpoints

    vistas_config(tmp_path, 3)
    narrow = lambda name, classes, norm_act, stride, **options: models.deeplabv3(
        "resnet18", classes, norm_act, 16, **options
    )
    monkeypatch.setattr(prediction, "deeplabv3", narrow)
    torch.manual_seed(0)
    model = narrow("", 3, ABN, 8)
    parts = {}
    for name, value in model.state_dict().items():
        part, _, rest = name.partition(".")
        parts.setdefault(part, {})[rest] = value
    torch.save({"state_dict": parts}, tmp_path / "vistas.pth.tar")
    monkeypatch.setattr(checkpoints, "RELEASED", {checksum(tmp_path / "vistas.pth.tar"): "abs+eps"})
    predictor = prediction.load(tmp_path / "vistas.pth.tar", tmp_path / "config.json", CPU)
    assert predictor.longest == 2048 and predictor.model.head.pooling_size == (84, 84)
    png(tmp_path / "a.png", picture(0, (40, 64)))
    predictor.longest = 128
    classes, sure = predictor(tmp_path / "a.png", [1.0], False, "mean", Segmentation())
    assert classes.shape == sure.shape == (40, 64) and int(classes.max()) < 3


def checksum(path: Path) -> str:
    import hashlib

    return hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()
