//! Data from members: control messages, expected frames, requests and measurements. Lengths are checked before anything
//! is allocated; a protocol violation closes the connection.
use super::inner::Inner;
use super::peer::{BULK, Peer};
use crate::buffer_pool::Buffer;
use crate::bulk;
use crate::close::CloseCode;
use crate::compress;
use crate::event::{Event, Received};
use crate::frame::{self, Codec, Expectation, FrameError, HEADER_BYTES, Incoming, RawHeader};
use crate::probe;
use quinn::{ReadExactError, RecvStream, SendStream, VarInt};
use std::{io, sync::Arc};
use tokio::io::AsyncReadExt;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Largest control message: a full push-pull of 2,000 members with adverts.
pub const MESSAGE_BYTES_MAX: usize = 4 << 20;
/// Larger payloads are decompressed on a blocking thread.
const UNPACK_HERE_MAX: usize = 64 << 10;
/// First byte of a request stream.
pub(super) const REQUEST: u8 = 1;
/// First byte of a measurement stream.
pub(super) const PROBE: u8 = 2;

/// Starts reading everything that `peer` sends; ends with the connection.
pub(super) fn spawn(inner: &Arc<Inner>, peer: &Arc<Peer>, control: RecvStream) {
    let runtime = &inner.runtime;
    runtime.spawn(messages(inner.clone(), peer.clone(), control));
    let (streams, who) = (inner.clone(), peer.clone());
    runtime.spawn(async move {
        while let Ok(stream) = who.connection.accept_uni().await {
            streams.runtime.spawn(frames(streams.clone(), who.clone(), stream));
        }
    });
    let (streams, who) = (inner.clone(), peer.clone());
    runtime.spawn(async move {
        while let Ok((send, recv)) = who.connection.accept_bi().await {
            streams.runtime.spawn(answer(streams.clone(), who.clone(), send, recv));
        }
    });
}

async fn messages(inner: Arc<Inner>, peer: Arc<Peer>, mut recv: RecvStream) {
    loop {
        let length = match recv.read_u32_le().await {
            Ok(length) => length as usize,
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                return peer.close(CloseCode::Bye, "the peer closed the connection");
            }
            Err(_) => return,
        };
        if length > MESSAGE_BYTES_MAX {
            let why = format!("a control message of {length} bytes, at most {MESSAGE_BYTES_MAX} are allowed");
            return refuse(&inner, &peer, CloseCode::BadMessage, &why);
        }
        let Some(credit) = credit(&peer.messages_arrived, length).await else { return };
        let mut bytes = vec![0; length];
        if recv.read_exact(&mut bytes).await.is_err() {
            return;
        }
        inner.sink.event(Event::Message { from: peer.node, bytes: Received::new(bytes, Some(credit)) });
    }
}

async fn frames(inner: Arc<Inner>, peer: Arc<Peer>, mut recv: RecvStream) {
    let mut header = [0; HEADER_BYTES];
    let Ok(()) = recv.read_exact(&mut header).await else { return };
    let first = match frame::decode_header(&header) {
        Ok(first) => first,
        Err(error) => return refuse_frame(&inner, &peer, &error),
    };
    let Some(expected) = inner.expected(&first.head.route) else {
        let route = first.head.route;
        let why = format!(
            "frames of job {:016x}, epoch {}, part {}: not expected here",
            route.job, route.epoch.counter, route.part
        );
        let _ = recv.stop(VarInt::from_u32(CloseCode::BadFrame as u32));
        return inner.refused(Some(peer.peer_id), peer.connection.remote_address(), why);
    };
    let mut raw = first;
    loop {
        if let Err(Failure::Frame(error)) = one_frame(&inner, &peer, &mut recv, raw, &expected).await {
            return refuse_frame(&inner, &peer, &error);
        }
        match recv.read_exact(&mut header).await {
            Ok(()) => {}
            Err(ReadExactError::FinishedEarly(0) | ReadExactError::ReadError(_)) => return,
            Err(ReadExactError::FinishedEarly(_)) => return refuse_frame(&inner, &peer, &CUT),
        }
        raw = match frame::decode_header(&header) {
            Ok(next) if next.head.route == first.head.route => next,
            Ok(_) => return refuse_frame(&inner, &peer, &FrameError::Route),
            Err(error) => return refuse_frame(&inner, &peer, &error),
        };
    }
}

/// A stream that ends inside a frame.
const CUT: FrameError = FrameError::Length { expected: HEADER_BYTES as u64, raw: 0, wire: 0 };

enum Failure {
    Frame(FrameError),
    /// The stream or the connection ended, which is reported elsewhere.
    Gone,
}

async fn one_frame(
    inner: &Inner,
    peer: &Arc<Peer>,
    recv: &mut RecvStream,
    raw: RawHeader,
    expected: &Expectation,
) -> Result<(), Failure> {
    let incoming = raw.check(expected).map_err(Failure::Frame)?;
    peer.frame_passed();
    let credit = credit(&peer.frames_arrived, incoming.raw_length).await.ok_or(Failure::Gone)?;
    let mut payload = Buffer::of(incoming.wire_length);
    recv.read_exact(&mut payload).await.map_err(|_| Failure::Gone)?;
    incoming.check(&payload).map_err(Failure::Frame)?;
    let payload = unpack(incoming, payload).await.map_err(Failure::Frame)?;
    let payload = Received::new(payload, Some(credit));
    inner.sink.event(Event::Frame { from: peer.node, head: incoming.head, payload });
    Ok(())
}

async fn unpack(incoming: Incoming, payload: Buffer) -> Result<Buffer, FrameError> {
    let Incoming { head, codec, raw_length, .. } = incoming;
    let work = move || compress::unpack(codec, head.dtype, payload.into(), raw_length).map(Buffer::from);
    if codec == Codec::Raw || raw_length <= UNPACK_HERE_MAX {
        return work();
    }
    // The join fails only when the runtime is shutting down, and then the frame is not needed.
    tokio::task::spawn_blocking(work).await.unwrap_or(Err(FrameError::Packed { raw: raw_length }))
}

/// Waits until the node has room for `bytes` more from this peer.
async fn credit(arrived: &Arc<Semaphore>, bytes: usize) -> Option<OwnedSemaphorePermit> {
    arrived.clone().acquire_many_owned(u32::try_from(bytes).ok()?).await.ok()
}

async fn answer(inner: Arc<Inner>, peer: Arc<Peer>, send: SendStream, mut recv: RecvStream) {
    let _ = send.set_priority(BULK);
    match recv.read_u8().await {
        Ok(REQUEST) => bulk::answer(send, recv, peer.node, &*inner.server, &peer.throttle).await,
        // The peer that requested the measurement reports a failure.
        Ok(PROBE) => probe::answer(send, recv).await.into_iter().for_each(|rate| peer.learn_link_in(rate)),
        Ok(_) => refuse(&inner, &peer, CloseCode::BadMessage, "a stream of an unknown kind"),
        Err(_) => {}
    }
}

fn refuse_frame(inner: &Inner, peer: &Peer, error: &FrameError) {
    refuse(inner, peer, CloseCode::BadFrame, &error.to_string());
}

fn refuse(inner: &Inner, peer: &Peer, code: CloseCode, why: &str) {
    peer.close(code, why);
    inner.refused(Some(peer.peer_id), peer.connection.remote_address(), why);
}
