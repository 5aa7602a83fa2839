from __future__ import annotations

import threading

import msgspec
import pytest
import zmq

from hex_llm.errors import ConfigError
from hex_llm.parallel.links import END, Follower, Invitation, Leader


def test_frames_come_in_order_to_all_and_an_end_is_told():
    leader = Leader("127.0.0.1", 2)
    followers = [Follower(leader.invitation, index) for index in (1, 2)]
    leader.await_followers(10)
    frames = [bytes([i]) * (1 + i) ** 2 for i in range(256)]
    for frame in [*frames, bytes(1 << 20)]:  # the long ones are not copied
        leader.send(frame)
    for follower in followers:
        assert [follower.socket.recv() for _ in frames] == frames
        assert follower.socket.recv() == bytes(1 << 20)
    leader.close()
    for follower in followers:
        assert follower.socket.recv() == END
        follower.close()


@pytest.mark.parametrize("lost_first", ["leader", "follower"])
def test_who_is_gone_is_noticed_on_both_sides(lost_first):
    leader = Leader("127.0.0.1", 1)
    follower = Follower(leader.invitation, 1)
    leader.await_followers(10)
    ends = {"leader": leader, "follower": follower}
    gone, left = ends.pop(lost_first), *ends.values()
    lost = threading.Event()
    left.on_loss(lost.set)
    gone.close()
    assert lost.wait(30)
    if left is follower:  # a leader says farewell to followers, of whom none is left
        left.close()


def test_strangers_are_neither_let_in_nor_missed():
    leader = Leader("127.0.0.1", 1)
    invited = msgspec.msgpack.decode(leader.invitation, type=Invitation)
    strangers = [
        Follower(msgspec.msgpack.encode(Invitation(invited.address, invited.beats_address, key, own)), 1)
        for key, own in (
            (invited.leader_key, zmq.curve_keypair()),  # a client's key that was not given out
            (zmq.curve_keypair()[0], invited.follower_key),  # another leader is meant
        )
    ]
    plain = zmq.Context().socket(zmq.DEALER)
    plain.connect(invited.address)
    plain.send(b"here")
    with pytest.raises(ConfigError, match="1 of the other hosts did not connect within 1 s"):
        leader.await_followers(1)

    lost = threading.Event()
    leader.on_loss(lost.set)
    follower = Follower(leader.invitation, 1)
    leader.await_followers(10)
    for stranger in strangers:
        stranger.close()
    plain.context.destroy(linger=0)
    leader.send(b"step")
    assert follower.socket.recv() == b"step"
    assert not lost.wait(1)
    leader.close()
    follower.close()
