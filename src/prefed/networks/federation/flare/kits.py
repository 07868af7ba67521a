"""Startup kits of the hub and the sites, created by NVIDIA FLARE's provisioning.

A kit contains a private key, a certificate signed by the federation's own authority, and settings: the hub's
address, the classes that a job may name, and permissions. Only parties with a kit can take part. The
authority's key stays in the folder ``authority``, where it is needed to add sites later.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from prefed.config.errors import validate
from prefed.config.file import read_toml
from prefed.core import files
from prefed.core.strict_settings import ConfigError, StrictModel
from prefed.core.text import listed
from prefed.networks.federation.config import OWN_DATA, check_name
from prefed.networks.federation.flare.process import ALLOWED, REGISTRATION

AUTHORITY = "authority"
LASTING = ("name", "hub", "port", "valid_days")
"""Keys of a project file that are fixed in certificates and kits once these exist."""
HEARTBEAT = 2.0
"""Seconds between two heartbeats of a site."""
NOBODY: Mapping[str, str] = {
    "submit_job": "none",
    "clone_job": "none",
    "manage_job": "none",
    "download_job": "none",
    "operate": "none",
    "shell_commands": "none",
    "byoc": "none",
    "server-predeployed-flwr": "none",
}
PERMISSIONS: Mapping[str, Any] = {
    "project_admin": NOBODY,
    "org_admin": {**NOBODY, "view": "o:site"},
    # The hub's account: it opens sessions, and cannot read files or run commands at a site.
    "lead": {**NOBODY, "submit_job": "any", "manage_job": "n:submitter", "view": "any"},
    "member": {**NOBODY, "view": "none"},
}
"""FLARE's role → its rights, at the hub and at each site."""

_RIGHTS = ("local/resources.json", "local/authorization.json")
WHOLE: Mapping[str, Sequence[str]] = {
    "server": ("fed_server.json", "rootCA.pem", "server.crt", "server.key"),
    "admin": ("fed_admin.json", "rootCA.pem", "client.crt", "client.key"),
    "site": ("fed_client.json", "rootCA.pem", "client.crt", "client.key"),
}
"""Party → the files that FLARE needs in ``startup`` of its kit."""

README = "readme.txt"
SITE_README = """\
The kit of a site, for `prefed site site.toml`. Do not run the scripts in it. Keep its private key secret.
"""
HUB_README = """\
Part of the hub's kit, for `prefed federate`. Do not run the scripts in it. Keep its private key secret.
"""

SITE_FILE = """\
# Settings of this site. Start it with `prefed site site.toml`.
federation = {federation}
name = {name}

# This site's pairs; keys of an experiment's [data]: {own}.
[data]
train = {{ {client} = "pairs.jsonl" }}     # a single client with this name
# partition = {{ by = "column", column = "ward" }} # several clients: this and train = "pairs.jsonl"

[model]
name = "./model"            # folder of the federation's base model

[disclose]
names = true                # false: report pseudonyms of clients to the hub
pairs = true                # report clients' numbers of pairs, which weight the merge; required

[limits]
# methods = ["feddpo"]      # default: all
# exchanges = ["train"]     # default: all
rounds = 1000
minimum_cohort = 2
minimum_pairs = 0
# privacy = "local"         # require noise that is added at this site; "distributed": at each site
evaluate = true
# judgements = 10000        # with [judge]: pairs of completions that a client judges in a run

# How clients judge completions of the hub: utility, selector:RUN, reward:FOLDER, …
# [judge]
# name = "reward:./judge"

# For secure sums: the others' fingerprints, from `prefed site keys` there. Compare them by telephone.
# [sites]
# south = "eight-words-joined-by-hyphens"
"""


_HOST = re.compile(r"(?=.{1,253}$)(?!-)[A-Za-z0-9-]{1,63}(?<!-)(\.(?!-)[A-Za-z0-9-]{1,63}(?<!-))*")


class Project(StrictModel):
    """The project file of a federation, from which its kits are created."""

    name: str = Field(description="the federation's name")
    hub: str = Field(description="host name or IPv4 address of the hub as seen by the sites, without a port")
    port: int = Field(8002, ge=1, le=65535, description="the hub's port, which sites must be able to reach")
    sites: list[str] = Field(min_length=1, description="names of the sites")
    valid_days: int = Field(
        360,
        ge=1,
        description="validity of the authority's certificate in days; those of hub and sites are valid for "
        "360 days, but not longer than the authority's",
    )
    message_mb: int = Field(4096, ge=1, description="maximum length of an answer to the hub in MiB")

    @field_validator("name")
    @classmethod
    def _named(cls, value: str) -> str:
        return check_name(value)

    @field_validator("hub")
    @classmethod
    def _reached(cls, value: str) -> str:
        if not _HOST.fullmatch(value):
            raise ValueError(
                "must be a host name or an IPv4 address without scheme, port or path, e.g. fed.example.org"
            )
        return value

    @field_validator("sites")
    @classmethod
    def _apart(cls, value: list[str]) -> list[str]:
        if dotted := [name for name in value if "." in check_name(name)]:
            raise ValueError(f"{dotted[0]!r}: NVIDIA FLARE does not allow '.' in a site's name: rename it")
        taken = {"hub", "server", AUTHORITY}
        if len({check_name(name) for name in value} | taken) < len(value) + len(taken):
            raise ValueError(f"sites must have different names, other than 'hub', 'server' and {AUTHORITY!r}")
        return value

    @classmethod
    def load(cls, path: Path) -> Project:
        """Read a project file.

        Raises:
            ConfigError: the file cannot be read, or a key or value is invalid.
        """
        tables = read_toml(path, "write one with name, hub and sites as in docs/federation.md")
        return validate(cls, tables, str(path))


@dataclass(frozen=True)
class Kits:
    """The hub's kits.

    Attributes:
        sites: names of the sites that have kits.
        server: folder of the server's kit.
        admin: folder of the kit of the account that opens sessions.
        user: name of that account.
        message_mb: maximum length of an answer in MiB.
    """

    federation: str
    sites: tuple[str, ...]
    server: Path
    admin: Path
    user: str
    organisation: str
    message_mb: int = 4096

    @classmethod
    def open(cls, folder: Path) -> Kits:
        """Open the kits in the hub's folder.

        Raises:
            FileNotFoundError: there is no kit, or a kit is incomplete.
        """
        path = folder / "hub.json"
        try:
            fields = json.loads(path.read_text("utf-8"))
        except FileNotFoundError:
            raise FileNotFoundError(
                f"{folder} does not contain the hub's kit: `prefed federation init PROJECT` creates it"
            ) from None
        sites = tuple(fields["sites"])
        folder = folder.resolve()
        server, admin = folder / "server", folder / "admin"
        check_whole(server, "server")
        check_whole(admin, "admin")
        most = fields.get("message_mb", cls.message_mb)
        return cls(fields["federation"], sites, server, admin, fields["user"], "hub", most)


def check_whole(kit: Path, party: str) -> None:
    """Check that a kit has all files that FLARE needs, and those without which FLARE would use its defaults.

    Args:
        party: a key of :data:`WHOLE`.

    Raises:
        FileNotFoundError: a file is missing.
    """
    names = [f"startup/{name}" for name in WHOLE[party]] + ([] if party == "admin" else [*_RIGHTS])
    if missing := [name for name in names if not (kit / name).is_file()]:
        raise FileNotFoundError(
            f"{kit} is incomplete: missing {listed(missing, str)}; restore the kit from a copy"
        )


def settle(kit: Path) -> None:
    """Make the server store its files in its kit, and allow this version's classes.

    Run at each start, since FLARE needs absolute paths, and kits outlive versions of prefed.
    """
    path, storage = kit / "local" / "resources.json", kit.resolve() / "storage"
    files.private_folder(storage)
    resources = json.loads(path.read_text("utf-8"))
    persistor = resources["snapshot_persistor"]["args"]["storage"]["args"]
    persistor["root_dir"] = str(storage / "snapshots")
    for each in resources["components"]:
        if each["id"] == "job_manager":
            each["args"]["uri_root"] = str(storage / "jobs")
    resources["class_allow_list"] = list(ALLOWED)
    files.write(path, json.dumps(resources, indent=1).encode())


def make_kits(project: Project, out: Path) -> None:
    """Create the kits of all parties in ``out``. Existing kits are kept, so sites can be added.

    The folders are ``hub`` and one for each site, with a template of ``site.toml``.

    Raises:
        FileExistsError: ``out`` contains something else.
        ConfigError: a key of :data:`LASTING` differs from that of the existing kits.
    """
    from nvflare.lighter.constants import CtxKey
    from nvflare.lighter.impl.cert import CertBuilder
    from nvflare.lighter.impl.signature import SignatureBuilder
    from nvflare.lighter.impl.static_file import StaticFileBuilder
    from nvflare.lighter.impl.workspace import WorkspaceBuilder
    from nvflare.lighter.provision import prepare_project
    from nvflare.lighter.provisioner import Provisioner

    if out.exists() and any(out.iterdir()) and not (out / AUTHORITY).is_dir():
        raise FileExistsError(f"{out} is not empty and is not a federation's folder: choose another --out")
    _check_lasting(project, out)
    authority, user = out / AUTHORITY, "hub@federation.local"
    files.private_folder(authority)
    server = {"name": project.hub, "type": "server", "org": "hub", "fed_learn_port": project.port}
    sites = [{"name": name, "type": "client", "org": organisation_of(name)} for name in project.sites]
    admin = {"name": user, "type": "admin", "org": "hub", "role": "lead"}
    builders = [
        WorkspaceBuilder(["master_template.yml"]),
        StaticFileBuilder(config_folder="config", scheme="grpc"),
        CertBuilder(root_valid_days=project.valid_days),
        SignatureBuilder(),
    ]
    described = {"api_version": 3, "name": project.name, "participants": [server, *sites, admin]}
    with redirect_stdout(StringIO()) as said:
        context = Provisioner(str(authority.resolve()), builders).provision(prepare_project(described))
    if context.get(CtxKey.BUILD_ERROR):
        raise OSError(f"NVIDIA FLARE could not create the kits:\n{said.getvalue()}")
    made = Path(context[CtxKey.CURRENT_PROD_DIR])
    place_kit(made / project.hub, out / "hub" / "server", HUB_README)
    place_kit(made / user, out / "hub" / "admin", HUB_README)
    about = {
        "federation": project.name,
        "sites": project.sites,
        "user": user,
        "message_mb": project.message_mb,
    }
    files.write(out / "hub" / "hub.json", json.dumps(about, indent=1).encode())
    for name in project.sites:
        place_kit(made / name, out / name / "kit", SITE_README)
        path = out / name / "site.toml"
        if not path.exists():
            words = {"federation": json.dumps(project.name), "name": json.dumps(name)}
            words |= {"client": json.dumps(name), "own": ", ".join(OWN_DATA)}
            path.write_text(SITE_FILE.format(**words), "utf-8")
    shutil.rmtree(made)


def address(startup: Path) -> tuple[str, str, int]:
    """The federation's name and the hub's host name and port, read from a kit.

    Args:
        startup: folder ``startup`` of the server's or a site's kit.

    Raises:
        OSError, ValueError: the settings are missing or damaged.
    """
    path = next(
        (path for path in (startup / "fed_server.json", startup / "fed_client.json") if path.exists()), None
    )
    if path is None:
        raise FileNotFoundError(
            f"{startup} has no fed_server.json or fed_client.json: restore the kit from a copy"
        )
    try:
        server = json.loads(path.read_text("utf-8"))["servers"][0]
        host, _, port = server["service"]["target"].rpartition(":")
        return str(server["name"]), host, int(port)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: {error!r}; restore it from a copy") from error


def _check_lasting(project: Project, out: Path) -> None:
    """Refuse a project whose fixed keys differ from those of the existing kits."""
    made = _made_with(out)
    for key in LASTING:
        if key in made and made[key] != (now := getattr(project, key)):
            raise ConfigError(
                f"{key} = {now!r}: the kits in {out} were created with {made[key]!r}: restore that value, or "
                "create new kits in another --out"
            )


def _made_with(out: Path) -> dict[str, Any]:
    """The keys of :data:`LASTING` of the kits in ``out``; empty if there are none."""
    from cryptography import x509

    found = [out / "hub" / "server" / "startup", *sorted(out.glob("*/kit/startup"))]
    startup = next((each for each in found if each.is_dir()), None)
    if startup is None:
        return {}
    name, hub, port = address(startup)
    authority = x509.load_pem_x509_certificate((startup / "rootCA.pem").read_bytes())
    valid = authority.not_valid_after_utc - authority.not_valid_before_utc
    return {"name": name, "hub": hub, "port": port, "valid_days": valid.days}


def organisation_of(site: str) -> str:
    """A site's organisation in FLARE, which may only have letters, digits and underscores."""
    return "".join(c if c.isalnum() else "_" for c in site)


def place_kit(made: Path, kit: Path, readme: str) -> None:
    """Copy a kit into place with prefed's settings. An existing kit is kept with its key.

    Args:
        readme: replaces FLARE's text, which asks users to run FLARE's scripts.
    """
    if kit.exists():
        return
    files.private_folder(kit.parent)
    # Renamed when it is whole, because an existing kit is kept.
    new = kit.with_name(f"{kit.name}.partial")
    shutil.rmtree(new, ignore_errors=True)
    shutil.copytree(made, new)
    new.chmod(0o700)
    (new / "startup" / README).unlink(missing_ok=True)
    (new / README).write_text(readme, "utf-8")
    local = new / "local"
    resources = local / "resources.json.default"
    content = json.loads(resources.read_text("utf-8"))
    if "class_allow_list" in content:
        _restrict(content)
        files.write(local / "resources.json", json.dumps(content, indent=1).encode())
        text = json.dumps({"format_version": "1.0", "permissions": PERMISSIONS}, indent=1)
        files.write(local / "authorization.json", text.encode())
    files.replace(new, kit)


def _restrict(resources: dict[str, Any]) -> None:
    """Allow jobs to name only prefed's classes, and do not stream logs to the hub."""
    resources["class_allow_list"] = list(ALLOWED)
    resources["class_list_enforcement_mode"] = "enforce"
    resources["allow_log_streaming"] = False
    components: Sequence[dict[str, Any]] = resources["components"]
    resources["components"] = [
        each for each in components if each["id"] not in ("site_log_streamer", "log_receiver")
    ]
    if "servers" in resources:
        resources["servers"][0]["heart_beat_timeout"] = 30
    else:
        resources["components"].append({"id": "registration", "path": REGISTRATION, "args": {}})
