"""One donor as the joiner's session sees it: the stream's thread, the link's thread, a waiting thread for each lane."""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
import threading
import time
from collections.abc import Callable

import torch

from protos.recovery.v1.peer_pb2 import JoinerLetter
from recovery.errors import ChunkDamaged, DonorLost, RecoveryError
from recovery.protocol.crew import RECEIVE_SECONDS, WAIT_SECONDS, Crew
from recovery.protocol.joiner_io import Arrived, Dialled, Ended, Heard, JoinerEvent, LinkOpened, PostedPull, Quiet
from recovery.protocol.meeting import MeetingPoint
from recovery.protocol.ports import Dial, DonorPeer, JoinerConversation, OpenLink
from recovery.transport.link import Link, Transfer

logger = logging.getLogger(__name__)

_TOLD_TOGETHER = 8
_TOLD_SECONDS = 0.002
"""What arrives faster than this is reported several at a time: waking the session costs more than a receive."""


class _Receiving:
    """The receives of one flight: whoever waits for the last of them hashes the chunk, while a cache has it."""

    def __init__(self, num_pulls: int, when_whole: Callable[[], None]) -> None:
        self._lock = threading.Lock()
        self._left = num_pulls
        self._when_whole = when_whole

    def landed(self) -> None:
        with self._lock:
            self._left -= 1
            whole = self._left == 0
        if whole:
            self._when_whole()


class DonorLine:
    """Dials a donor, hears it, opens the link, waits for what was posted; reports everything as events.

    Args:
        peer: The donor.
        report: Takes events; called from this line's threads.
        dial: Opens the stream.
        probe: Measures the round trip if ``dial`` did not; None: then it is not measured.
        open_link: Opens this end of the link.
        seal: Returns the link sealed; called with it, the donor's public key, the scope and the donor's name.
        data_host: What the link binds.
    """

    def __init__(
        self,
        peer: DonorPeer,
        report: Callable[[JoinerEvent], None],
        *,
        dial: Dial,
        probe: Callable[[DonorPeer], float] | None,
        open_link: OpenLink,
        seal: Callable[[Link, bytes, str, str], Link],
        data_host: str,
    ) -> None:
        self._peer = peer
        self._report = report
        self._dial = dial
        self._probe = probe
        self._open_link = open_link
        self._seal = seal
        self._data_host = data_host
        self._lock = threading.Lock()
        self._crew = Crew("recovery-joiner", f"-{peer.name}")
        self._conversation: JoinerConversation | None = None
        self._meeting = MeetingPoint(lambda letter: self.say(JoinerLetter(meeting=letter)))
        self._link: Link | None = None
        self._lanes: list[queue.SimpleQueue[tuple[int, Transfer, _Receiving] | None]] = []
        self._untold: list[JoinerEvent] = []
        self._told_at = 0.0
        self._closer: threading.Thread | None = None

    def start(self) -> None:
        """Begin to dial."""
        self._crew.spawn("letters", self._converse)

    def say(self, letter: JoinerLetter) -> None:
        """Send a letter; a stream that has ended is reported by its own thread."""
        conversation = self._conversation
        if conversation is not None:
            with contextlib.suppress(RecoveryError):  # the receiving side reports why the stream ended
                conversation.send(letter)

    def open_link(self, scope: str, lanes: int, sealing_key: bytes = b"") -> None:
        """Begin to open the link, sealed if the donor has sent its public key."""
        self._crew.spawn("link", lambda: self._link_up(scope, lanes, sealing_key))

    def post(self, memory: torch.Tensor, pulls: tuple[PostedPull, ...], when_whole: Callable[[], None]) -> bool:
        """Post receives into a chunk's memory. False: the link is broken, which is reported as an event.

        ``when_whole`` is called on a lane's thread when all of them have ended well, before the last is reported.
        """
        link = self._link
        receiving = _Receiving(len(pulls), when_whole)
        try:
            if link is None:
                raise DonorLost(f"{self._peer.name}: the link is not open")
            for pull in pulls:
                into = memory[pull.offset : pull.offset + pull.num_bytes]
                transfer = link.receive(pull.lane, pull.tag, into)
                self._lanes[pull.lane].put((pull.pull_id, transfer, receiving))
        except RecoveryError as error:
            self._report(Ended(self._peer.name, error))
            return False
        return True

    def tell(self) -> None:
        """Report what has arrived and was held back for company."""
        with self._lock:
            untold, self._untold = self._untold, []
            self._told_at = time.monotonic()
        for event in untold:
            self._report(event)

    def bytes_moved(self) -> int | None:
        """Return the link's progress count; None without a link."""
        link = self._link
        return link.bytes_moved() if link is not None else None

    def drop(self, reason: str) -> None:
        """Shut the link at once, end the threads in the background, then report ``Quiet``. Twice without harm."""
        with self._lock:
            if self._closer is not None:
                return
            self._crew.end()
            link = self._link
            self._closer = threading.Thread(
                target=self._close, args=(reason,), name=f"recovery-joiner-close-{self._peer.name}"
            )
        self._meeting.end(reason)
        if link is not None:
            link.shut(reason)
        self._closer.start()

    def join(self) -> None:
        """Return when every thread of a dropped line has ended."""
        if self._closer is not None:
            self._closer.join()

    def _close(self, reason: str) -> None:
        def release() -> None:
            with self._lock:
                conversation, link = self._conversation, self._link
            if conversation is not None:
                conversation.close(reason)
            if link is not None:
                link.shut(reason)
            for lane in self._lanes:
                lane.put(None)

        self._crew.join(release)
        if self._link is not None:
            self._link.close()
        self.tell()
        self._report(Quiet(self._peer.name))

    def _converse(self) -> None:
        name = self._peer.name
        try:
            conversation = self._dial(self._peer)
            with self._lock:
                self._conversation = conversation
            round_trip = conversation.round_trip_seconds
            if round_trip is None and self._probe is not None:
                round_trip = self._probe(self._peer)
            self._report(Dialled(name, round_trip))
            while not self._crew.ended.is_set():
                letter = conversation.receive(RECEIVE_SECONDS)
                if letter is None:
                    continue
                if letter.HasField("meeting"):
                    self._meeting.heard(letter.meeting)
                else:
                    self._report(Heard(name, letter))
        except RecoveryError as error:
            self._report(Ended(name, error))
        except Exception as error:  # noqa: BLE001 - the thread's root: whatever else went wrong ends this donor, not the joiner
            self._report(Ended(name, DonorLost(f"{name}: the conversation failed: {error!r}")))

    def _link_up(self, scope: str, lanes: int, sealing_key: bytes) -> None:
        name = self._peer.name
        try:
            link = self._open_link(self._meeting, scope, self._data_host, lanes, self._crew.ended)
            if sealing_key:
                link = self._seal(link, sealing_key, scope, name)
        except RecoveryError as error:
            self._report(Ended(name, error))
            return
        except Exception as error:  # noqa: BLE001 - the thread's root, as above
            self._report(Ended(name, DonorLost(f"{name}: the data link failed to open: {error!r}")))
            return
        with self._lock:
            self._link = link
            self._lanes = [queue.SimpleQueue() for _ in range(link.lanes)]
        for lane in range(link.lanes):
            self._crew.spawn(f"lane-{lane}", functools.partial(self._wait_on, lane), of_lane=True)
        self._report(LinkOpened(name, link.lanes, tuple(link.endpoints()), link.round_trip_seconds()))

    def _wait_on(self, lane: int) -> None:
        """Wait for the lane's receives in their order, each exactly once; ends when the line is dropped."""
        name = self._peer.name
        waiting = self._lanes[lane]
        while (posted := waiting.get()) is not None:
            pull_id, transfer, receiving = posted
            try:
                try:
                    transfer.wait(WAIT_SECONDS)
                except ChunkDamaged as error:
                    # The link is whole. What the memory holds now is judged by its digest, as any damaged piece is.
                    logger.warning("%s", error)
                receiving.landed()
            except RecoveryError as error:
                # The others of this lane are waited for too: until each wait has ended its memory is not ours.
                self.tell()
                self._report(Ended(name, error))
                continue
            except Exception as error:  # noqa: BLE001 - the thread's root, as above
                self.tell()
                self._report(Ended(name, DonorLost(f"{name}: what arrived could not be taken: {error!r}")))
                continue
            with self._lock:
                self._untold.append(Arrived(name, pull_id))
                alone = len(self._untold) >= _TOLD_TOGETHER or time.monotonic() - self._told_at > _TOLD_SECONDS
            if alone or waiting.empty():
                self.tell()
