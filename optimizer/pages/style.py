"""Colours, and figures of matplotlib as SVG that takes its colours from the page."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# name -> (on a light page, on a dark one); each is one colour of its own, so that a page can find it in a figure
PALETTE: Mapping[str, tuple[str, str]] = {
    "page": ("#ffffff", "#14171b"),
    "ink": ("#1b1f24", "#e8ebee"),
    "quiet": ("#57606a", "#a2abb5"),
    "rule": ("#d5dae0", "#343b43"),
    "panel": ("#f5f7f9", "#1d2126"),
    "good": ("#0b6b3a", "#63cf94"),
    "bad": ("#b3261e", "#ff8a80"),
    "front": ("#0b5cad", "#79b8ff"),
    "dot": ("#7d8792", "#8a949f"),
    "stage-1": ("#7a5195", "#b08bd0"),
    "stage-2": ("#1b868b", "#55c0c5"),
    "stage-3": ("#c2571a", "#f0965c"),
    "stage-4": ("#8c6d1f", "#cfae57"),
    "stage-5": ("#2a8f5b", "#6fcf9c"),
    "stage-6": ("#b83280", "#f07fbe"),
    "stage-7": ("#5f6b76", "#99a5b1"),
}
TEXTS = ("ink", "quiet", "good", "bad", "front")  # colours of words: 4.5 to 1 on page and panel
MARKS = ("dot", *(name for name in PALETTE if name.startswith("stage-")))  # of marks: 3 to 1
LIGHT = {name: light for name, (light, _) in PALETTE.items()}
STAGE_COLOURS = tuple(colour for name, colour in LIGHT.items() if name.startswith("stage-"))

ROLE_COLOURS = {
    "recommended": LIGHT["good"],
    "closest": LIGHT["bad"],
    "baseline": LIGHT["stage-3"],
    "dynamic_batching {}": LIGHT["front"],
}

WIDTH, HEIGHT = 10.0, 4.7  # inches of 72 units of the SVG
PNG_DPI = 144
_SVG = "http://www.w3.org/2000/svg"
_HREF = "{http://www.w3.org/1999/xlink}href"


@dataclass(frozen=True)
class Drawing:
    """``description`` tells what is to be seen to who does not see it. ``labels``: what the dots of a group, by its
    gid, are, in their order."""

    name: str
    title: str
    description: str
    figure: Figure
    labels: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def _repr_png_(self) -> bytes:
        """As a notebook shows it."""
        return png(self)


@contextmanager
def drawing() -> Iterator[None]:
    """Inside it matplotlib draws as the pages look, takes no text for a formula, and says nothing."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    import matplotlib as mpl

    look: dict[Any, Any] = {
        "axes.axisbelow": True,
        "axes.edgecolor": LIGHT["quiet"],
        "axes.facecolor": "none",
        "axes.grid": True,
        "axes.labelcolor": LIGHT["quiet"],
        "axes.labelsize": 11,
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.titlecolor": LIGHT["ink"],
        "axes.titlelocation": "left",
        "axes.titlesize": 11,
        "figure.facecolor": "none",
        "font.family": "DejaVu Sans",
        "font.size": 11,
        "grid.color": LIGHT["rule"],
        "legend.frameon": False,
        "legend.labelcolor": LIGHT["ink"],
        "svg.fonttype": "none",
        "svg.hashsalt": "tritune",
        "text.color": LIGHT["ink"],
        "text.parse_math": False,
        "xtick.bottom": False,
        "xtick.color": LIGHT["quiet"],
        "xtick.labelsize": 10,
        "ytick.color": LIGHT["quiet"],
        "ytick.labelsize": 10,
        "ytick.left": False,
    }
    with mpl.rc_context(look), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a letter that the font lacks: the browser has it
        yield


def new_figure(height: float = HEIGHT) -> Figure:
    """Without pyplot, which keeps figures and looks for a screen."""
    from matplotlib.figure import Figure

    return Figure(figsize=(WIDTH, height))


def svg(drawn: Drawing) -> str:
    """A file of its own, in the light colours on white."""
    text = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with drawing():
        drawn.figure.savefig(text, format="svg", metadata=nothing, facecolor=LIGHT["page"])
    return text.getvalue()


def png(drawn: Drawing) -> bytes:
    data = io.BytesIO()
    with drawing():
        drawn.figure.savefig(data, format="png", dpi=PNG_DPI, facecolor=LIGHT["page"])
    return data.getvalue()


def inline(drawn: Drawing, prefix: str) -> str:
    """To stand in a page: colours are the page's, ids begin with ``prefix``, the dots say what they are."""
    text = io.BytesIO()
    with drawing():
        drawn.figure.savefig(text, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    root = ElementTree.fromstring(text.getvalue())
    mark = f"{prefix}-{drawn.name}"
    for group, labels in drawn.labels.items():
        found = next((one for one in root.iter(f"{{{_SVG}}}g") if one.get("id") == group), None)
        dots = [] if found is None else list(found.iter(f"{{{_SVG}}}use"))
        for dot, told in zip(dots, labels, strict=False):
            ElementTree.SubElement(dot, "title").text = told
    _adapt(root, mark)
    _describe(root, drawn, mark)
    return ElementTree.tostring(root, encoding="unicode")


def _adapt(root: ElementTree.Element, mark: str) -> None:
    """Plain names, no style sheet of its own, colours of the page, and no ids but those that are referred to."""
    for definitions in list(root.iter(f"{{{_SVG}}}defs")):
        for sheet in definitions.findall(f"{{{_SVG}}}style"):
            definitions.remove(sheet)
    used = {element.get(_HREF, "").removeprefix("#") for element in root.iter()}
    used |= {element.get("clip-path", "")[5:-1] for element in root.iter()}  # url(#…)
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        attributes = element.attrib
        if attributes.get("id") in used:
            attributes["id"] = f"{mark}-{attributes['id']}"
        else:
            attributes.pop("id", None)
        if (target := attributes.pop(_HREF, None)) is not None:
            attributes["href"] = f"#{mark}-{target.removeprefix('#')}"
        if "clip-path" in attributes:
            attributes["clip-path"] = attributes["clip-path"].replace("url(#", f"url(#{mark}-")
        if "style" in attributes:
            for colour, value in LIGHT.items():
                attributes["style"] = attributes["style"].replace(value, f"var(--{colour})")


def _describe(root: ElementTree.Element, drawn: Drawing, mark: str) -> None:
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)
    root.attrib |= {
        "class": "plot",
        "role": "img",
        "aria-labelledby": f"{mark}-title",
        "aria-describedby": f"{mark}-desc",
    }
    for place, (tag, told) in enumerate((("title", drawn.title), ("desc", drawn.description))):
        element = ElementTree.Element(tag, {"id": f"{mark}-{tag}"})
        element.text = told
        root.insert(place, element)
