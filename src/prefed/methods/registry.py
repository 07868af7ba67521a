"""The methods by name."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from prefed.core.plugins import PluginError, Registry

if TYPE_CHECKING:
    from prefed.core import Layout, Method
    from prefed.merge import Aggregator
    from prefed.methods.base import TrainingSettings


@dataclass(frozen=True)
class MethodKind:
    """A method without a model. Its module is imported on first use.

    Attributes:
        name: the name in summaries and, of a method of prefed, the value of ``[method] name``.
        title: one-line description.
        personal: by default, each client gets a personal model.
        rounds: value of ``rounds`` written by ``prefed init``; ``None`` for the default of an experiment.
        serverless: the method runs on a graph of neighbours, by default the default ``[graph]``.
        module: name of the module with ``SOURCE``, ``Settings``, ``needs`` and ``build``, and, for some,
            the reasons ``NO_NOISE``, ``SINGLE_UPLOADS`` and ``COUNTS_CLIENTS``; in a file of your own,
            ``__name__``. Default: ``prefed.methods.NAME``.
    """

    name: str
    title: str
    personal: bool = False
    rounds: int | None = None
    serverless: bool = False
    module: str = ""

    @property
    def _module(self) -> ModuleType:
        builtin = f"prefed.methods.{self.name}"
        try:
            module = import_module(self.module or builtin)
        except (Exception, SystemExit) as error:
            if self.module:
                why = f": {self.module} cannot be imported: {type(error).__name__}: {error}"
            elif isinstance(error, ModuleNotFoundError) and error.name == builtin:
                why = " is not one of prefed: write MethodKind(…, module=__name__)"
            else:
                raise
            raise PluginError(f"method {self.name!r}{why}") from error
        if absent := [name for name in ("SOURCE", "Settings", "needs", "build") if not hasattr(module, name)]:
            place = getattr(module, "__file__", None) or module.__name__
            raise PluginError(f"method {self.name!r}: {place} does not define {', '.join(absent)}")
        return module

    @property
    def place(self) -> str:
        """What names this method in an experiment: its name if it is installed, else its file or module.

        Raises:
            PluginError: it is not at the top level of the file or module that it names.
        """
        if METHODS.get(self.name) is self:
            return self.name
        module = sys.modules.get(self.module)
        file = getattr(module, "__file__", None)
        names = [name for name, value in vars(module).items() if value is self] if module else []
        if self.module == "__main__" or not file or not names:
            raise PluginError(
                f"method {self.name!r} must be a variable in a file or package of its own, with "
                "module=__name__, because worker processes and later commands load it from there: move it, "
                f"e.g. to {self.name}.py, and import it"
            )
        # A file that is not in a package need not be importable elsewhere.
        packaged = "." in self.module or hasattr(module, "__path__")
        return f"{self.module if packaged else Path(file).resolve()}:{names[0]}"

    @property
    def source(self) -> str:
        """The paper, and the equation or algorithm."""
        return str(self._module.SOURCE)

    def reason(self, name: Literal["NO_NOISE", "SINGLE_UPLOADS", "COUNTS_CLIENTS"]) -> str:
        """Why it has no differential privacy, its server needs individual uploads, or a round depends on
        clients outside its cohort; empty otherwise.
        """
        return str(getattr(self._module, name, ""))

    @property
    def Settings(self) -> type[TrainingSettings]:  # noqa: N802
        """The class of the settings. Every field has a default and a description."""
        from prefed.methods.base import TrainingSettings

        settings = self._module.Settings
        if not (isinstance(settings, type) and issubclass(settings, TrainingSettings)):
            raise PluginError(
                f"method {self.name!r}: Settings must derive from LocalSettings of prefed.methods.base"
            )
        return settings

    @property
    def reads(self) -> Literal["policy", "choice"]:
        """The type of the models; see :class:`~prefed.core.Method`."""
        return self.Settings.reads

    @property
    def needs(self) -> Callable[[Any], frozenset[str]]:
        """A function from settings to required parts of the model, e.g. ``{"lora"}``.

        The merge rule may require more: :func:`prefed.merge.lora.needs`.
        """
        needs: Callable[[Any], frozenset[str]] = self._module.needs
        return needs

    @property
    def build(self) -> Callable[[Any, Layout, Aggregator, int], Method]:
        """``(settings, layout, aggregator, rounds) -> Method``."""
        build: Callable[[Any, Layout, Aggregator, int], Method] = self._module.build
        return build


METHODS = Registry(
    "methods",
    {
        kind.name: kind
        for kind in (
            MethodKind("feddpo", "DPO with federated averaging"),
            MethodKind(
                "decdpo", "DPO without a server: each client mixes with its neighbours", serverless=True
            ),
            MethodKind("fedsft", "supervised fine-tuning on the chosen responses with federated averaging"),
            MethodKind("fedprox", "FedDPO with a proximal term towards the shared model"),
            MethodKind("scaffold", "FedDPO with control variates against client drift"),
            MethodKind("centralized", "DPO on the pooled pairs of all clients"),
            MethodKind("local", "DPO on each client without communication", personal=True),
            MethodKind("icl", "a client's own pairs as examples, no training", personal=True, rounds=1),
            MethodKind("fedpdpo", "shared LoRA; personal bottleneck, head and reward head", personal=True),
            MethodKind("fedper", "LoRA shared in the first blocks, personal in the others", personal=True),
            MethodKind("fedrep", "shared LoRA and a personal head, trained alternately", personal=True),
            MethodKind("perfedavg", "a shared initial model that adapts in a few steps", personal=True),
            MethodKind("fedamp", "each client receives its own mixture of all models", personal=True),
            MethodKind("fedsdg", "a shared and a personal LoRA with a gate per block", personal=True),
            MethodKind("feddpa", "a shared and a personal LoRA, combined with a weight", personal=True),
            MethodKind("ditto", "FedDPO with a personal model pulled towards the shared one", personal=True),
            MethodKind("pfedme", "averaging over Moreau envelopes of the clients' losses", personal=True),
            MethodKind("fedala", "layer-wise weights between shared and personal models", personal=True),
            MethodKind("fedbn", "FedDPO with personal norm layers", personal=True),
            MethodKind("fedbis", "federated averaging of a selector that judges pairs"),
            MethodKind("fedbiscuit", "one selector per cluster of clients"),
            MethodKind("lore", "shared linear rewards, mixed by each client", personal=True, rounds=60),
            MethodKind("pal", "ideal points between shared prototypes", personal=True, rounds=60),
            MethodKind("fedvpl", "a selector with a latent taste per client", personal=True, rounds=60),
            MethodKind("fedvpa", "FedVPL with shared posteriors and prototypes", personal=True, rounds=60),
        )
    },
    "METHOD",
    MethodKind,
)
"""Name → method, in the order in which ``prefed methods`` lists them."""
