"""The parameter arrays of a published model, derived from its architecture."""

from __future__ import annotations

Conv = tuple[int, int, int]  # output channels, height, width

#: The columns of Inception-v3's modules (Szegedy et al., 2015), as in tf_cnn_benchmarks.
_A = [[(64, 1, 1)], [(48, 1, 1), (64, 5, 5)], [(64, 1, 1), (96, 3, 3), (96, 3, 3)]]
_B = [[(384, 3, 3)], [(64, 1, 1), (96, 3, 3), (96, 3, 3)]]
_D = [[(192, 1, 1), (320, 3, 3)], [(192, 1, 1), (192, 1, 7), (192, 7, 1), (192, 3, 3)]]
_E = [
    [(320, 1, 1)],
    [(384, 1, 1), (384, 1, 3)],
    [(448, 1, 1), (384, 3, 3), (384, 1, 3)],
    [(192, 1, 1)],
]
#: The second branches of a fork: input channels and convolution.
_FORKS = [(384, (384, 3, 1)), (384, (384, 3, 1))]


def _c(n: int) -> list[list[Conv]]:
    return [
        [(192, 1, 1)],
        [(n, 1, 1), (n, 1, 7), (192, 7, 1)],
        [(n, 1, 1), (n, 7, 1), (n, 1, 7), (n, 7, 1), (192, 1, 7)],
        [(192, 1, 1)],
    ]


def _column(channels: int, convs: list[Conv]) -> list[int]:
    """Return the bytes of each convolution's weights."""
    sizes = []
    for out, height, width in convs:
        sizes.append(4 * channels * out * height * width)
        channels = out
    return sizes


def inception_v3(classes: int = 1001) -> list[int]:
    """Return the bytes of each weight array; the classifier's array is the last.

    >>> sizes = inception_v3()
    >>> len(sizes), max(sizes), round(sum(sizes) / 1e6)
    (95, 8200192, 95)
    """
    stem = [
        (3, (32, 3, 3)),
        (32, (32, 3, 3)),
        (32, (64, 3, 3)),
        (64, (80, 1, 1)),
        (80, (192, 3, 3)),
    ]
    modules: list[tuple[int, list[list[Conv]]]] = [
        (192, [*_A, [(32, 1, 1)]]),
        (256, [*_A, [(64, 1, 1)]]),
        (288, [*_A, [(64, 1, 1)]]),
        (288, _B),
        (768, _c(128)),
        (768, _c(160)),
        (768, _c(160)),
        (768, _c(192)),
        (768, _D),
        (1280, _E),
        (2048, _E),
    ]
    sizes = [size for channels, conv in stem for size in _column(channels, [conv])]
    for channels, columns in modules:
        sizes += [size for column in columns for size in _column(channels, column)]
        if columns is _E:
            sizes += [size for fork, conv in _FORKS for size in _column(fork, [conv])]
    return [*sizes, 4 * 2048 * classes]
