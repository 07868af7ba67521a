"""Code from outside prefed, for tests: a method, and an installed package."""

LG_FEDAVG = '''"""LG-FedAvg: personal lower layers, shared upper layers (arXiv:2001.01523)."""

from pydantic import Field

from prefed.core import Entry, Layout, Method
from prefed.merge import Aggregator
from prefed.methods import MethodKind
from prefed.methods.base import FedAvgBase, LocalSettings, lora_parts

SOURCE = "LG-FedAvg (arXiv:2001.01523), algorithm 1"
METHOD = MethodKind("lgfedavg", "own lower blocks, shared upper blocks", personal=True, module=__name__)


class Settings(LocalSettings):
    blocks: int = Field(1, ge=0, description="lower blocks whose LoRA each client keeps")


needs = lora_parts


def build(settings: Settings, layout: Layout, aggregator: Aggregator, rounds: int) -> Method:
    def lower(entry: Entry) -> bool:
        return entry.block is not None and entry.block < settings.blocks

    fedavg = FedAvgBase.of(settings, aggregator, rounds, personal=lower)
    return fedavg.method("lgfedavg", SOURCE, fedavg.exchange())
'''


def install(folder, name, modules, points):
    """Write package ``name`` 1.5 as pip leaves it; ``folder`` is to be on Python's path.

    Args:
        modules: name of a file → its text.
        points: kind of entry point → its line.
    """
    (folder / name).mkdir(parents=True)
    for file, text in {"__init__.py": "", **modules}.items():
        (folder / name / file).write_text(text)
    info = folder / f"{name}-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n")
    (info / "top_level.txt").write_text(f"{name}\n")
    (info / "entry_points.txt").write_text("".join(f"[prefed.{k}]\n{v}\n" for k, v in points.items()))
    return folder
