"""AlexNet as Caffe's bvlc_reference_caffenet: the model that cuDNN's first paper made faster.

Krizhevsky, Sutskever, Hinton: ImageNet Classification with Deep Convolutional Neural Networks (NIPS 2012); Caffe's reference
model pools before it normalises. Convolutions 2, 4 and 5 have two groups; local response norms over 5 channels with alpha 1e-4
(divided by 5, as in Caffe), beta 0.75, k 1; max pools 3 x 3 with stride 2. Images are NHWC, 227 x 227.

Each convolution takes its bias and ReLU along.
"""

from __future__ import annotations

from typing import Any

from flax import linen

from jaxprims.models.base import Model


class AlexNet(Model):
    """``model(x, train)`` with x (N, 227, 227, 3) -> logits (N, num_classes).

    Attributes:
      num_classes: logits. width: filters of the first convolution; the others are in proportion. hidden: units of the two
        dense layers. dropout: rate behind each of them in training (the paper: 0.5); 0: none.

    >>> import jax, jax.numpy as jnp
    >>> from jaxprims.models import make
    >>> model = make("alexnet", layers="flax", width=24, hidden=32, num_classes=10)
    >>> variables = jax.eval_shape(model.init, jax.random.key(0), jnp.ones((1, 67, 67, 3)))
    >>> variables["params"]["Conv_1"]["kernel"].shape  # two groups: half the input channels
    (5, 5, 12, 64)
    """

    num_classes: int = 1000
    width: int = 96
    hidden: int = 4096
    dropout: float = 0.0

    @property
    def random(self) -> bool:
        return self.dropout > 0

    @linen.compact
    def __call__(self, x: Any, train: bool = True) -> Any:
        w = self.width

        def conv(model: AlexNet, x: Any, features: int, size: int, groups: int = 1, **options: Any) -> Any:
            return model.nn.Conv(
                features, (size, size), feature_group_count=groups, dtype=model.dtype, activation="relu", **options
            )(x)  # fmt: skip

        def pool(model: AlexNet, x: Any) -> Any:
            return model.nn.max_pool(x, (3, 3), strides=(2, 2))

        def pool_norm(model: AlexNet, x: Any) -> Any:
            return model.nn.LocalResponseNorm(size=5, alpha=1e-4, beta=0.75, k=1.0)(pool(model, x))

        def dense(model: AlexNet, x: Any) -> Any:
            x = model.nn.relu(model.nn.Dense(model.hidden, dtype=model.dtype)(x))
            return model.nn.Dropout(model.dropout, deterministic=not train)(x)

        x = conv(self, x, w, 11, strides=(4, 4), padding="VALID")
        x = self.stretch(lambda model, x: conv(model, pool_norm(model, x), w * 8 // 3, 5, groups=2, padding=2), x)
        x = self.stretch(lambda model, x: conv(model, pool_norm(model, x), w * 4, 3, padding=1), x)
        x = conv(self, x, w * 4, 3, groups=2, padding=1)
        x = conv(self, x, w * 8 // 3, 3, groups=2, padding=1)
        x = pool(self, x)
        x = x.reshape(x.shape[0], -1)
        x = dense(self, dense(self, x))
        return self.nn.Dense(self.num_classes, dtype=self.dtype)(x)
