"""Where upstream keeps its files: one table, from a dataset's name to what `fetch` downloads for it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Remote:
    """One upstream file.

    Args:
        url: its address.
        size: its length in bytes, None where unknown.
        md5: its checksum, None where unknown.
        optional: fetched only on request (SVHN's 1.3 GB of extra images).
    """

    url: str
    size: int | None = None
    md5: str | None = None
    optional: bool = False

    @property
    def name(self) -> str:
        """The file's own name, under which it is saved."""
        return self.url.rpartition("/")[2]


_MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist/"
_FASHION = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
_CIFAR = "https://www.cs.toronto.edu/~kriz/"
_SVHN = "http://ufldl.stanford.edu/housenumbers/"

SOURCES: dict[str, tuple[Remote, ...]] = {
    "mnist": (
        Remote(_MNIST + "train-images-idx3-ubyte.gz", 9_912_422, "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
        Remote(_MNIST + "train-labels-idx1-ubyte.gz", 28_881, "d53e105ee54ea40749a09fcbcd1e9432"),
        Remote(_MNIST + "t10k-images-idx3-ubyte.gz", 1_648_877, "9fb629c4189551a2d022fa330f9573f3"),
        Remote(_MNIST + "t10k-labels-idx1-ubyte.gz", 4_542, "ec29112dd5afa0611ce80d1b7f02629c"),
    ),
    "fashion-mnist": (
        Remote(_FASHION + "train-images-idx3-ubyte.gz", 26_421_880, "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
        Remote(_FASHION + "train-labels-idx1-ubyte.gz", 29_515, "25c81989df183df01b3e8a0aad5dffbe"),
        Remote(_FASHION + "t10k-images-idx3-ubyte.gz", 4_422_102, "bef4ecab320f06d8554ea6380940ec79"),
        Remote(_FASHION + "t10k-labels-idx1-ubyte.gz", 5_148, "bb300cfdad3c16e7a12a480ee83cd310"),
    ),
    "cifar-10": (Remote(_CIFAR + "cifar-10-python.tar.gz", 170_498_071, "c58f30108f718f92721af3b95e74349a"),),
    "cifar-100": (Remote(_CIFAR + "cifar-100-python.tar.gz", 169_001_437, "eb9058c3a382ffc7106e4002c42a8d85"),),
    "svhn": (
        Remote(_SVHN + "train_32x32.mat", 182_040_794, "e26dedcc434d2e4c54c9b2d4a06d8373"),
        Remote(_SVHN + "test_32x32.mat", 64_275_384, "eb5a983be6a315427106f1b164d9cef3"),
        Remote(_SVHN + "extra_32x32.mat", 1_329_278_602, "a93ce644f1a588dc4d68dda5feec44a7", optional=True),
    ),
    "cinic-10": (
        Remote(
            "https://datashare.ed.ac.uk/bitstream/handle/10283/3192/CINIC-10.tar.gz",
            687_544_992,
            "6ee4d0c996905fe93221de577967a372",
        ),
    ),
    "tiny-imagenet": (
        Remote(
            "http://cs231n.stanford.edu/tiny-imagenet-200.zip",
            248_100_043,
            "90528d7ca1a48142e341f4ef8d21d0de",
        ),
    ),
}

_LEAF = "make LEAF's (the TalwalkarLab/leaf repository, data/{0}, preprocess.sh -s niid --sf 1.0 -k 0 -t sample)"

ELSEWHERE: dict[str, str] = {
    "sst-2": "take GLUE's SST-2 (train.tsv, dev.tsv, test.tsv) and give the folder that holds them",
    "ag-news": "take AG's News as text (train.csv, test.csv) and give the folder that holds them",
    "femnist": _LEAF.format("femnist") + " and give the folder that holds its train/ and test/",
    "heart-disease": "take the four files processed.*.data from the UCI Machine Learning Repository (Heart Disease)",
    "shakespeare": _LEAF.format("shakespeare")
    + " or take plays in Jon Bosak's XML (the shakespeare corpus of nltk_data is such a zip)",
}
"""Datasets that upstream does not offer as files: how to obtain them, as the end of a sentence."""


def how_to_get(name: str) -> str:
    """What a user without the files of `name` should do, as the end of a sentence."""
    return ELSEWHERE.get(name, f"`fedstrata data fetch {name}` downloads them")
