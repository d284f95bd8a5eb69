"""What `auto` goes by where nobody has measured the machine: speeds that `fedstrata machine tune` found on another."""

from __future__ import annotations

from fedstrata.engines.speed_table import Cell, Family

_ROWS: tuple[tuple[Family, int, int, int, int, float, float], ...] = (
    ("convolutional", 14_464, 8, 4, 8, 1045.8, 527.0),
    ("convolutional", 14_464, 8, 4, 32, 1154.8, 216.9),
    ("convolutional", 14_464, 32, 4, 8, 1363.1, 914.8),
    ("convolutional", 14_464, 32, 4, 32, 1185.1, 496.3),
    ("convolutional", 144_000, 8, 4, 8, 1107.5, 785.2),
    ("convolutional", 144_000, 8, 4, 32, 1318.3, 482.9),
    ("convolutional", 144_000, 32, 4, 8, 1942.2, 1727.2),
    ("convolutional", 144_000, 32, 4, 32, 1888.2, 1557.5),
    ("convolutional", 580_160, 8, 4, 8, 1764.6, 1776.5),
    ("convolutional", 580_160, 8, 4, 32, 1911.0, 1529.1),
    ("convolutional", 580_160, 32, 4, 8, 4513.6, 6098.4),
    ("convolutional", 580_160, 32, 4, 32, 3415.9, 5725.4),
    ("dense", 15_680, 8, 1, 8, 340.1, 135.4),
    ("dense", 15_680, 8, 8, 8, 226.4, 70.6),
    ("dense", 15_680, 32, 1, 8, 385.5, 177.0),
    ("dense", 15_680, 32, 8, 8, 268.3, 127.2),
    ("dense", 15_680, 128, 1, 8, 614.8, 376.9),
    ("dense", 15_680, 128, 8, 8, 492.0, 409.2),
    ("dense", 101_632, 8, 1, 8, 475.6, 186.2),
    ("dense", 101_632, 8, 8, 8, 333.2, 116.4),
    ("dense", 101_632, 32, 1, 8, 660.9, 275.0),
    ("dense", 101_632, 32, 8, 8, 482.9, 220.9),
    ("dense", 101_632, 128, 1, 8, 971.3, 673.5),
    ("dense", 101_632, 128, 8, 8, 1180.8, 902.3),
    ("dense", 537_600, 8, 1, 8, 1073.4, 511.5),
    ("dense", 537_600, 8, 8, 8, 763.8, 519.0),
    ("dense", 537_600, 32, 1, 8, 1508.2, 878.0),
    ("dense", 537_600, 32, 8, 8, 1461.2, 958.2),
    ("dense", 537_600, 128, 1, 8, 3403.8, 2341.9),
    ("dense", 537_600, 128, 8, 8, 2466.7, 2213.3),
    ("dense", 3_723_264, 8, 1, 8, 6084.8, 3044.4),
    ("dense", 3_723_264, 8, 8, 8, 5332.5, 3506.4),
    ("dense", 3_723_264, 32, 1, 8, 8660.4, 5166.6),
    ("dense", 3_723_264, 32, 8, 8, 6567.1, 5081.0),
    ("dense", 3_723_264, 128, 1, 8, 18016.1, 15247.6),
    ("dense, torch.func", 15_680, 8, 4, 8, 296.6, 192.9),
    ("dense, torch.func", 15_680, 8, 4, 32, 285.1, 82.4),
    ("dense, torch.func", 15_680, 32, 4, 8, 364.3, 288.1),
    ("dense, torch.func", 15_680, 32, 4, 32, 313.4, 141.9),
    ("dense, torch.func", 101_632, 8, 4, 8, 441.2, 344.9),
    ("dense, torch.func", 101_632, 8, 4, 32, 387.6, 187.5),
    ("dense, torch.func", 101_632, 32, 4, 8, 537.9, 465.4),
    ("dense, torch.func", 101_632, 32, 4, 32, 588.3, 310.2),
    ("dense, torch.func", 537_600, 8, 4, 8, 829.9, 976.5),
    ("dense, torch.func", 537_600, 8, 4, 32, 971.5, 824.2),
    ("dense, torch.func", 537_600, 32, 4, 8, 1201.5, 1370.3),
    ("dense, torch.func", 537_600, 32, 4, 32, 1031.8, 1088.0),
)

BUILT_IN = tuple(Cell(*row, built_in=True) for row in _ROWS)
"""Of an AMD EPYC with torch 2.13, with AVX-512 and with AVX2 alone: of two cells the one with less to gain."""
