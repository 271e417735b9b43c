"""The demo on a short run: it learns, keeps its test images apart, draws, reports, and fails as it says."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from jaxprims import demo

for package in ("optax", "sklearn", "matplotlib", "rich"):
    pytest.importorskip(package)


def test_two_epochs_learn_and_draw(tmp_path, capsys):
    picture = tmp_path / "new" / "demo.png"
    code = demo.main(["--epochs", "2", "--output", str(picture), "--seed", "3"])
    out = capsys.readouterr()
    accuracy = float(out.out.split("Test accuracy ")[1].split("%")[0]) / 100
    assert accuracy > 0.8
    assert code == (0 if accuracy >= demo.GOAL else 1)
    assert ("Below the goal" in out.err) == (code == 1)
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    for words in ("conv ", "max_pool ", "log_softmax ", "kernel", "reference", str(picture)):
        assert words in out.out


@pytest.mark.parametrize("seed", [0, 1])
def test_no_test_image_is_trained_on(seed):
    from sklearn.datasets import load_digits

    data = demo.load_data(seed)
    assert len(data.train_x) + len(data.test_x) == 1797 and len(data.test_x) == 360
    both = np.concatenate([data.train_x, data.test_x]).reshape(1797, -1) * 16
    images = load_digits().data
    np.testing.assert_array_equal(both[np.lexsort(both.T)], images[np.lexsort(images.T)])  # a partition of all images
    assert np.bincount(data.test_y, minlength=10).min() >= 34


def test_shifts_move_by_at_most_one_pixel():
    import jax
    import jax.numpy as jnp

    x = jnp.zeros((64, 8, 8, 1)).at[:, 4, 4].set(1.0)
    y = np.asarray(demo.shifted(jax.random.key(0), x))[..., 0]
    places = {tuple(np.argwhere(image)[0] - 4) for image in y}
    assert y.sum() == 64 and places == {(i, j) for i in (-1, 0, 1) for j in (-1, 0, 1)}


def test_a_missing_package_is_named_with_the_remedy(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "optax", None)
    assert demo.main(["--epochs", "1"]) == 2
    err = capsys.readouterr().err
    assert "optax" in err and "pip install 'jaxprims[demo]'" in err


@pytest.mark.parametrize("epochs", ["0", "-3", "many"])
def test_epochs_must_be_positive(epochs, capsys):
    with pytest.raises(SystemExit) as info:
        demo.main(["--epochs", epochs])
    assert info.value.code == 2 and "--epochs" in capsys.readouterr().err
