"""Sums over programs that are a cluster: each writes its own into the shared memory of all, and waits for theirs.

Programs of a cluster start together, so that nobody waits for one that has no room, and what they tell each other goes neither
by way of memory nor by that of the L2 cache. Gluon has no words for all of it: what threads run is written down here. A program
begins with :func:`invite`, early, and goes on to :func:`over_cluster`. Nobody reads another's shared memory: a program may end
when it has what it waits for.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .device import PATIENCE


@gluon.constexpr_function
def inviting(size):
    """Room for so many bytes, behind a barrier that counts them as they come; the others are told that it is there.

    Out: where it begins.
    """
    return f"""{{
    .shared .align 8 .b8 room[{8 + size}];
    .reg .pred first;
    .reg .b32  thread;
    mov.u32    $0, room;
    mov.u32    thread, %tid.x;
    setp.eq.u32 first, thread, 0;
    @first mbarrier.init.shared::cta.b64 [$0], 1;
    @first mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], {size};
    @first fence.mbarrier_init.release.cluster;
    barrier.cluster.arrive.relaxed;
}}"""


# Until all have told that their rooms are there. Out: nothing of meaning.
INVITED = gl.constexpr("""{
    barrier.cluster.wait;
    mov.u32    $0, 0;
}""")
# Thread i sends the pair of channel i. Out: nothing of meaning; in: the pair, the channel, where in a room it belongs, where
# rooms begin, and which program's it is.
OFFER = gl.constexpr("""{
    .reg .pred own;
    .reg .b32  thread, there, arrived;
    mov.u32    $0, 0;
    mov.u32    thread, %tid.x;
    setp.eq.u32 own, thread, $3;
    mapa.shared::cluster.u32 there, $4, $6;
    mapa.shared::cluster.u32 arrived, $5, $6;
    @own st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [there], {$1, $2}, [arrived];
}""")
# Until all bytes have come. Out: nothing of meaning; in: where the room begins.
AWAIT = gl.constexpr(f"""{{
    .reg .pred done, again;
    .reg .b32  looks;
    mov.u32    looks, 0;
AGAIN:
    mbarrier.try_wait.parity.shared::cta.b64 done, [$1], 0;
    @done      bra DONE;
    add.u32    looks, looks, 1;
    setp.lt.u32 again, looks, {PATIENCE.value};
    @again     bra AGAIN;
    trap;
DONE:
    mov.u32    $0, 0;
}}""")
# Out: a pair; in: where in the room it is.
TAKE = gl.constexpr("""{
    ld.shared.v2.f32 {$0, $1}, [$2];
}""")


@gluon.jit
def invite(P: gl.constexpr, CLUSTER: gl.constexpr):
    """Room for two sums of P channels from each program of the cluster."""
    return gl.inline_asm_elementwise(inviting(8 * P * CLUSTER), "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def over_cluster(one, other, room, member, P: gl.constexpr, CLUSTER: gl.constexpr, WARPS: gl.constexpr):
    """The sums of both over the programs of the cluster, in their order; no more channels than threads."""
    i = gl.arange(0, P, gl.BlockedLayout([1], [32], [WARPS], [0]))
    first = room + 8 + 8 * i
    gl.inline_asm_elementwise(INVITED, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    for whose in gl.static_range(CLUSTER):
        gl.inline_asm_elementwise(
            OFFER, "=r,f,f,r,r,r,r", [one, other, i, first + 8 * P * member, room, whose],
            dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    gl.inline_asm_elementwise(AWAIT, "=r,r", [room], dtype=gl.int32, is_pure=False, pack=1)
    one = gl.zeros_like(one)
    other = one
    for p in gl.static_range(CLUSTER):
        u, v = gl.inline_asm_elementwise(
            TAKE, "=f,=f,r", [first + 8 * P * p], dtype=(gl.float32, gl.float32), is_pure=False, pack=1
        )
        one += u
        other += v
    return one, other
