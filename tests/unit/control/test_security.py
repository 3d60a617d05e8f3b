"""Who may talk, to the coordinator and to peers: wrong or missing credentials are refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.recovery.v1 import peer_pb2, peer_pb2_grpc
from recovery.control.channel import open_channel
from recovery.control.conversation import StreamConversation
from recovery.control.operator_client import OperatorClient
from recovery.control.peer_client import dial
from recovery.control.peer_probe import probe
from recovery.control.peer_service import PeerServer
from recovery.control.rpc_errors import status_code
from recovery.control.security import SecurityConfig, is_loopback
from recovery.errors import BadConfiguration, CoordinatorUnreachable, PeerUnreachable, RecoveryError, RunRefused
from recovery.types import Address
from tests.support.certificates import Authority
from tests.support.coordinators import RecordingClient, coordinator

TOKEN = "a-token-of-the-run"
RIGHT = SecurityConfig(token=TOKEN)
WRONG = SecurityConfig(token="some-other-token")
NONE = SecurityConfig()


def answer(conversation: StreamConversation[peer_pb2.DonorLetter, peer_pb2.JoinerLetter]) -> None:
    """A donor that answers each letter until the joiner leaves."""
    while True:
        try:
            letter = conversation.receive(None)
        except RecoveryError:
            return
        if letter is not None:
            conversation.send(peer_pb2.DonorLetter(opened=peer_pb2.Opened(lanes=1)))


def peer(security: SecurityConfig) -> PeerServer:
    return PeerServer("127.0.0.1", 0, answer, security)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.0.0.2", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.1.2.3", False),
        ("node-1", False),
        ("localhost.example.org", False),
    ],
)
def test_loopback_is_told_from_the_rest(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


def test_plaintext_beyond_loopback_has_to_be_asked_for() -> None:
    with pytest.raises(BadConfiguration, match=r"10\.0\.0\.1.*--insecure"):
        RIGHT.check_host("10.0.0.1", what="the address")
    SecurityConfig(insecure=True).check_host("10.0.0.1", what="the address")
    SecurityConfig(authority_file="ca.pem").check_host("10.0.0.1", what="the address")


@pytest.mark.parametrize(
    "make",
    [
        lambda: SecurityConfig(token="x", token_file="y"),
        lambda: SecurityConfig(certificate_file="c"),
        lambda: SecurityConfig(key_file="k"),
        lambda: SecurityConfig(token="short").bearer_token(),
        lambda: SecurityConfig(token="has a space in it").bearer_token(),
        lambda: SecurityConfig(token="line\nbreak-in-it").bearer_token(),
        lambda: SecurityConfig(token_file="/nonexistent/token").bearer_token(),
        lambda: SecurityConfig(authority_file="/nonexistent/ca").channel_credentials(),
        lambda: SecurityConfig(authority_file="ca").server_credentials(),
    ],
)
def test_settings_that_cannot_work_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(BadConfiguration):
        make()


def test_a_token_comes_from_a_file_without_its_newline(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    assert SecurityConfig(token_file=str(file)).bearer_token() == TOKEN
    file.write_text("\n")
    with pytest.raises(BadConfiguration, match="token"):
        SecurityConfig(token_file=str(file)).bearer_token()


def test_tls_that_would_admit_everybody_is_refused(tmp_path: Path) -> None:
    certificate, key = Authority(tmp_path, "ca").issue("server")
    with pytest.raises(BadConfiguration, match="admits everybody"):
        SecurityConfig(certificate_file=certificate, key_file=key).server_credentials()
    SecurityConfig(certificate_file=certificate, key_file=key, token=TOKEN).server_credentials()


@pytest.mark.parametrize("security", [WRONG, NONE], ids=["wrong", "missing"])
def test_the_coordinator_names_a_wrong_token(tmp_path: Path, security: SecurityConfig) -> None:
    with coordinator(tmp_path, security=RIGHT) as server:
        with RecordingClient(server.address, security=security) as worker:
            with pytest.raises(RunRefused, match="token"):
                worker.client.wait_attached(30)
            assert "token" in worker.wait_detached()
            with pytest.raises(RunRefused, match="token"):
                worker.client.key_value().set("scope", "key", b"value")
        with OperatorClient(server.address, security) as operator, pytest.raises(RunRefused, match="token"):
            operator.list()
        with OperatorClient(server.address, security) as operator, pytest.raises(RunRefused, match="token"):
            next(operator.watch())


def test_the_right_token_passes_every_kind_of_call(tmp_path: Path) -> None:
    with coordinator(tmp_path, security=RIGHT) as server:
        with RecordingClient(server.address, security=RIGHT) as worker:
            worker.client.wait_attached(30)
            worker.client.key_value().set("scope", "key", b"value")
        with OperatorClient(server.address, RIGHT) as operator:
            assert operator.list().run_id == "scripted"


def test_health_is_open_to_those_who_can_carry_no_token(tmp_path: Path) -> None:
    with coordinator(tmp_path, security=RIGHT) as server:
        channel = open_channel(server.address, NONE, what="the coordinator")
        found = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
        assert found.status == health_pb2.HealthCheckResponse.SERVING
        channel.close()


@pytest.mark.parametrize("security", [WRONG, NONE], ids=["wrong", "missing"])
def test_a_peer_names_a_wrong_token(security: SecurityConfig) -> None:
    with peer(RIGHT) as server:
        with pytest.raises(RunRefused, match="token"):
            probe(server.address, security)
        with pytest.raises(RunRefused, match="token"):
            dial([server.address], security)


def test_a_stranger_who_skips_the_probe_gets_no_conversation() -> None:
    heard: list[object] = []
    with PeerServer("127.0.0.1", 0, heard.append, RIGHT) as server:
        channel = open_channel(server.address, WRONG, what="the peer")
        with pytest.raises(grpc.RpcError) as caught:
            list(peer_pb2_grpc.PeerServiceStub(channel).Converse(iter([peer_pb2.JoinerLetter()]), timeout=10))
        assert status_code(caught.value) is grpc.StatusCode.UNAUTHENTICATED
        channel.close()
    assert heard == []


def test_mutual_tls_admits_only_what_the_authority_signed(tmp_path: Path) -> None:
    ours, theirs = Authority(tmp_path, "ours"), Authority(tmp_path, "theirs")
    certificate, key = ours.issue("server")
    server_side = SecurityConfig(certificate_file=certificate, key_file=key, authority_file=str(ours.certificate_file))
    certificate, key = ours.issue("worker")
    worker_side = SecurityConfig(certificate_file=certificate, key_file=key, authority_file=str(ours.certificate_file))
    certificate, key = theirs.issue("stranger")
    stranger = SecurityConfig(certificate_file=certificate, key_file=key, authority_file=str(ours.certificate_file))
    nobody = SecurityConfig(authority_file=str(ours.certificate_file))

    with coordinator(tmp_path / "history", security=server_side) as server:
        with RecordingClient(server.address, security=worker_side) as worker:
            worker.client.wait_attached(30)
        for refused in (stranger, nobody, NONE):
            with OperatorClient(server.address, refused) as operator, pytest.raises(CoordinatorUnreachable):
                operator.list(timeout_seconds=5)
    with peer(server_side) as donor:
        conversation = dial([donor.address], worker_side)
        conversation.send(peer_pb2.JoinerLetter(open=peer_pb2.Open()))
        assert conversation.receive(30) is not None
        conversation.close("done")
        for refused in (stranger, nobody, NONE):
            with pytest.raises(PeerUnreachable):
                dial([donor.address], refused)


def test_files_that_do_not_go_together_are_named_before_anything_is_created(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "ours")
    certificate, key = authority.issue("server")
    _, other_key = authority.issue("other")
    junk = tmp_path / "junk.pem"
    junk.write_text("not PEM")
    ca, history = str(authority.certificate_file), tmp_path / "history"
    for files, says in (
        ((certificate, other_key, ca), f"{certificate} and key file {other_key} do not belong together"),
        ((key, certificate, ca), f"{key} holds no PEM certificate"),
        ((certificate, str(junk), ca), f"{junk} holds no PEM private key"),
        ((certificate, key, str(junk)), f"{junk} holds no PEM certificates"),
    ):
        wrong = SecurityConfig(certificate_file=files[0], key_file=files[1], authority_file=files[2])
        with pytest.raises(BadConfiguration, match=re.escape(says)), coordinator(history, security=wrong):
            pass
        with pytest.raises(BadConfiguration, match=re.escape(says)), OperatorClient("127.0.0.1:9", wrong) as operator:
            operator.list()
        assert not list(history.glob("*")), "a run was created"


def test_an_operator_is_told_what_is_wrong_with_the_certificates(tmp_path: Path) -> None:
    ours, theirs = Authority(tmp_path, "ours"), Authority(tmp_path, "theirs")
    certificate, key = ours.issue("server")
    ca, other_ca = str(ours.certificate_file), str(theirs.certificate_file)
    server_side = SecurityConfig(certificate_file=certificate, key_file=key, authority_file=ca)
    stranger = theirs.issue("stranger")
    cases = (
        (SecurityConfig(authority_file=other_ca), f"not signed by --authority {other_ca}"),
        (SecurityConfig(authority_file=ca), "may demand a client certificate (--certificate FILE --key FILE)"),
        (SecurityConfig(authority_file=ca, tls_server_name="nobody"), "--tls-server-name"),
        (
            SecurityConfig(certificate_file=stranger[0], key_file=stranger[1], authority_file=ca),
            f"may not trust --certificate {stranger[0]}",
        ),
        (NONE, "may demand TLS"),
    )
    with coordinator(tmp_path / "tls", security=server_side) as server:
        for security, says in cases:
            with (
                OperatorClient(server.address, security) as operator,
                pytest.raises(CoordinatorUnreachable, match=re.escape(says)),
            ):
                operator.list(timeout_seconds=30)
    with (
        coordinator(tmp_path / "plain") as server,
        OperatorClient(server.address, server_side) as operator,
        pytest.raises(CoordinatorUnreachable, match="does not talk TLS"),
    ):
        operator.list(timeout_seconds=30)


def test_one_certificate_may_serve_every_worker_by_its_name(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "ours")
    certificate, key = authority.issue("shared")
    shared = SecurityConfig(
        certificate_file=certificate,
        key_file=key,
        authority_file=str(authority.certificate_file),
        tls_server_name="worker",
    )
    with peer(shared) as donor:
        assert probe(donor.address, shared).bytes_per_second > 0
        other_name = SecurityConfig(
            certificate_file=certificate,
            key_file=key,
            authority_file=str(authority.certificate_file),
            tls_server_name="somebody-else",
        )
        with pytest.raises(PeerUnreachable):
            probe(donor.address, other_name)


def test_servers_do_not_listen_in_plaintext_beyond_loopback(tmp_path: Path) -> None:
    with pytest.raises(BadConfiguration, match="--insecure"):
        PeerServer("192.0.2.1", 0, answer, RIGHT).start()
    with (
        pytest.raises(BadConfiguration, match="--insecure"),
        coordinator(tmp_path, security=RIGHT, listen=Address("0.0.0.0", 0)),
    ):
        pass
