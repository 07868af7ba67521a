"""What a stranger, or a member with its certificate, sends to live FLARE processes before anything is agreed.

    python benchmarks/entrance.py
    python benchmarks/entrance.py payloads       # a part of it

Payloads of FLARE's serialisation (FOBS), connections before authentication, expired certificates, and other
names than the certificate's; rows as in ``strangers.py``. The hub and north are those of ``attacked.py``.
"""

from __future__ import annotations

import json
import pickle
import shutil
import socket
import ssl
import sys
import tempfile
import time
from base64 import b64encode
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

from attacked import HEAD, PATIENCE, Attacked, connects, free_port, print_row
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization

from prefed.networks.federation.flare.kits import HEARTBEAT
from prefed.networks.federation.flare.process import CLIENT, SITE_DOOR, FlareProcess

Row = tuple[str, str, str, str]
GENERIC = "nvflare.fuel.utils.fobs.decomposer.DataClassDecomposer"
NUMPY = "nvflare.app_common.decomposers.numpy_decomposers.NumpyArrayDecomposer"
IDLE = 500
"""Connections that a stranger holds open."""


class Evil:
    """Unpickled, it creates a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (str(self.mark), "w")


def fobs(kind: str, data: object, decomposer: str = GENERIC) -> dict[str, object]:
    """FLARE's form of an object: its type, how it is rebuilt, and of what."""
    return {"__fobs_type__": kind, "__fobs_data__": data, "__fobs_dc__": decomposer}


def payloads(place: Attacked) -> Iterator[Row]:
    """A member sends heartbeats, which the hub accepts, with payloads that would run code or fill memory."""
    mark = place.folder / "it-ran"
    evil = pickle.dumps(Evil(mark))
    pickle.loads(evil).close()
    works = "unpickled here: it ran" if mark.exists() else "IT DOES NOT WORK HERE"
    mark.unlink()
    header = b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }"
    npy = b"\x93NUMPY\x01\x00" + (len(header) + 1).to_bytes(2, "little") + header + b"\n" + evil
    huge = header.replace(b"|O", b"<f8").replace(b"(1,)", b"(1000000000000,)")
    far = b"\x93NUMPY\x01\x00" + (len(huge) + 1).to_bytes(2, "little") + huge + b"\n"
    nested: object = 0
    for _ in range(400):
        nested = [nested]
    popen = {"args": ["touch", str(mark)]}
    arrays = [fobs("numpy.ndarray", {"base64": b64encode(each).decode()}, NUMPY) for each in (npy, far)]
    for what, payload, said in (
        ("a class that starts a process", fobs("subprocess.Popen", popen), "is not allowed"),
        ("a decomposer of its choice", fobs("nowhere.Type", "1", "builtins.eval"), "must be registered"),
        ("an array that holds a pickle", arrays[0], "allow_pickle"),
        ("an array of 8 TB in 100 bytes", arrays[1], "Unable to allocate"),
        ("lists 400 levels deep", nested, "AssertionError"),
    ):
        heartbeat = ["server", "task", "heart_beat", payload]
        (got,) = place.member(heartbeat)
        time.sleep(1)
        alive = "north is connected" if "north" in place.transport.connected() else "THE HUB IS GONE"
        ran = "IT RAN" if mark.exists() else "nothing ran"
        text = (place.kits / "hub/server/process.log").read_text(errors="replace")
        line = next((line for line in reversed(text.splitlines()) if said in line), "")
        yield f"a member sends {what} to the hub", f"{got['code']}; {ran}; {alive}", works, line.strip()


def idle(place: Attacked) -> Iterator[Row]:
    """A stranger holds connections open without a handshake, or sends what is not TLS."""
    startup = place.kits / "north/kit/startup"
    own = ssl.create_default_context(cafile=str(startup / "rootCA.pem"))
    own.load_cert_chain(startup / "client.crt", startup / "client.key")
    held = [socket.create_connection(("localhost", place.port)) for _ in range(IDLE)]
    for each in held[::2]:
        each.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(1000))
    came = connects(place.port, own)
    alive = "north is connected" if "north" in place.transport.connected() else "NORTH IS GONE"
    for each in held:
        each.close()
    control = f"without them: {connects(place.port, own)}"
    yield f"{IDLE} connections without a handshake", f"a member then: {came}; {alive}", control, ""


def certified(place: Attacked, name: str, days: int, folder: Path) -> ssl.SSLContext:
    """A context with a certificate of the federation's authority that ends in so many days."""
    state = next((place.kits / "authority").rglob("cert.json"))
    authority = json.loads(state.read_text())
    key = serialization.load_pem_private_key(authority["root_pri_key"].encode(), None)
    root = x509.load_pem_x509_certificate(authority["root_cert"].encode())
    was = x509.load_pem_x509_certificate((folder / name).with_suffix(".crt").read_bytes())
    end = datetime.now(UTC) + timedelta(days=days)
    made = (
        x509.CertificateBuilder()
        .subject_name(was.subject)
        .issuer_name(root.subject)
        .public_key(was.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(end - timedelta(days=30))
        .not_valid_after(end)
    )
    for extension in was.extensions:
        made = made.add_extension(extension.value, extension.critical)
    path = place.folder / f"{name}-{days}.crt"
    signed = made.sign(key, hashes.SHA256())
    path.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    side = ssl.PROTOCOL_TLS_SERVER if name == "server" else ssl.PROTOCOL_TLS_CLIENT
    context = ssl.SSLContext(side)
    context.load_verify_locations(str(folder / "rootCA.pem"))
    context.load_cert_chain(path, (folder / name).with_suffix(".key"))
    return context


def expired(place: Attacked) -> Iterator[Row]:
    """A site's certificate that has ended, at the hub's live server; then the hub's, at a site's client."""
    startup = place.kits / "south/kit/startup"
    ended, valid = (connects(place.port, certified(place, "client", d, startup)) for d in (-1, 1))
    yield "a member with an expired certificate", ended, f"one that ends tomorrow: {valid}", ""
    came = []
    for days in (-1, 1):
        context = certified(place, "server", days, place.kits / "hub/server/startup")
        came.append(shown_to_a_site(place, context))
    yield "a hub with an expired certificate", came[0], f"one that ends tomorrow: {came[1]}", ""


def shown_to_a_site(place: Attacked, context: ssl.SSLContext) -> str:
    """What the client of a site does with a server that shows a certificate."""
    context.set_alpn_protocols(["h2"])
    kit = place.folder / f"kit-{free_port()}"
    shutil.copytree(place.kits / "south/kit", kit)
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
        path = kit / "startup/fed_client.json"
        path.write_text(path.read_text().replace(f":{place.port}", f":{port}"))
        words = ["uid=south", "org=south", f"heart_beat_interval={HEARTBEAT}"]
        client = FlareProcess(CLIENT, kit, words, {SITE_DOOR: str(place.door.path)})
        server.settimeout(PATIENCE)
        try:
            plain, _ = server.accept()
            plain.settimeout(PATIENCE)
            with context.wrap_socket(plain, server_side=True) as wrapped:
                # With TLS 1.3 a refusal comes after the handshake.
                return "it sends its first frames" if wrapped.recv(24).startswith(b"PRI") else "it closes"
        except (ssl.SSLError, ConnectionError) as error:
            return f"it refuses: {error}"
        finally:
            client.stop()


def names(place: Attacked) -> Iterator[Row]:
    """A member calls itself another, from its first message on."""
    hello = ["server", "task", "challenge", {"nonce": "n"}]
    (own,) = place.member(hello)
    for who, changes in (
        ("north", {"name": "north", "site": "north"}),
        ("the hub", {"name": "server", "site": "south"}),
        ("a job of north's", {"name": "north.b2e0c9d4-0c6f-4d5e-9a57-3c4f0f6d1a11", "site": "south"}),
    ):
        (got,) = place.member(hello, **changes)
        log = (place.kits / "hub/server/log.txt").read_text().splitlines()
        claimed = f"authenticated as 'south' but claimed endpoint '{changes['name']}'"
        line = next((line for line in reversed(log) if claimed in line), "")
        yield (
            f"a member calls itself {who}",
            str(got["code"]),
            f"by its own name: admitted ({own['code']})",
            line.partition("Error: ")[2],
        )


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, Attacked(Path(folder), guarded=True) as place:
        print(HEAD)
        for attack in (names, payloads, idle, expired):
            if sys.argv[1:] and attack.__name__ not in sys.argv[1:]:
                continue
            for row in attack(place):
                print_row(*row)


if __name__ == "__main__":
    main()
