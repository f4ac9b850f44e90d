//! Requests with long responses (weights, manifests): a short request on its own stream, the response in blocks, and an
//! end marker that distinguishes a complete response from a truncated one.
use crate::identity::NodeId;
use crate::throttle::Throttle;
use bytes::Bytes;
use thiserror::Error;
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    sync::mpsc,
};

/// Largest request: a list of a thousand chunk hashes.
pub const REQUEST_BYTES_MAX: usize = 64 << 10;
/// Largest block of a response: a chunk of a shard index.
pub const BLOCK_BYTES_MAX: usize = 1 << 20;
/// Blocks produced ahead of the network.
const BLOCKS_AHEAD: usize = 2;
/// Longest error text, in bytes.
const ERROR_BYTES_MAX: usize = 1 << 10;
/// In place of a block length: end of the response.
const END: u32 = 0;
/// In place of a block length: an error text follows.
const FAILED: u32 = u32::MAX;

/// Serves requests of members. Called on a network task: long work belongs on a thread, which takes the [`Reply`].
pub trait Serve: Send + Sync + 'static {
    /// Answers `request` through `reply`.
    fn serve(&self, from: NodeId, request: Bytes, reply: Reply);
}

impl<F: Fn(NodeId, Bytes, Reply) + Send + Sync + 'static> Serve for F {
    fn serve(&self, from: NodeId, request: Bytes, reply: Reply) {
        self(from, request, reply);
    }
}

/// The responding end of a request. Dropping it before `finish` makes the response truncated for the requester.
#[derive(Debug)]
pub struct Reply(mpsc::Sender<Part>);

#[derive(Debug)]
enum Part {
    Block(Bytes),
    End,
    Failed(String),
}

impl Reply {
    /// Sends the next part of the response; waits while the network is behind. `false` if the requester has gone.
    pub async fn send(&self, bytes: Bytes) -> bool {
        for block in blocks(bytes) {
            if self.0.send(Part::Block(block)).await.is_err() {
                return false;
            }
        }
        true
    }

    /// Like `send`, from a thread outside the runtime.
    ///
    /// # Panics
    /// On a thread of the runtime, as all blocking calls of tokio.
    pub fn blocking_send(&self, bytes: Bytes) -> bool {
        blocks(bytes).all(|block| self.0.blocking_send(Part::Block(block)).is_ok())
    }

    /// Completes the response. On a full queue, a task of the runtime (or this thread, outside it) waits for room.
    pub fn finish(self) {
        self.last(Part::End);
    }

    /// Ends the response with an error.
    pub fn fail(self, why: impl Into<String>) {
        self.last(Part::Failed(why.into()));
    }

    fn last(self, part: Part) {
        match self.0.try_send(part) {
            Ok(()) | Err(mpsc::error::TrySendError::Closed(_)) => {}
            Err(mpsc::error::TrySendError::Full(part)) => match tokio::runtime::Handle::try_current() {
                Ok(runtime) => {
                    runtime.spawn(async move {
                        let _ = self.0.send(part).await;
                    });
                }
                Err(_) => {
                    let _ = self.0.blocking_send(part);
                }
            },
        }
    }
}

fn blocks(mut bytes: Bytes) -> impl Iterator<Item = Bytes> {
    std::iter::from_fn(move || {
        let n = bytes.len().min(BLOCK_BYTES_MAX);
        (n > 0).then(|| bytes.split_to(n))
    })
}

/// Sends a request; its response is read through [`Response`].
pub(crate) async fn ask<W: AsyncWrite + Unpin>(mut send: W, request: &[u8]) -> Result<(), RequestError> {
    if request.len() > REQUEST_BYTES_MAX {
        return Err(RequestError::TooLong { bytes: request.len() });
    }
    let mut bytes = Vec::with_capacity(4 + request.len());
    crate::wire::put_long(&mut bytes, request);
    send.write_all(&bytes).await.map_err(|_| RequestError::Truncated)?;
    send.shutdown().await.map_err(|_| RequestError::Truncated)
}

/// Reads a request, passes it to `server`, and writes the response at the throttled rate.
pub(crate) async fn answer<W, R>(mut send: W, mut recv: R, from: NodeId, server: &dyn Serve, throttle: &Throttle)
where
    W: AsyncWrite + Unpin,
    R: AsyncRead + Unpin,
{
    let Ok(length) = recv.read_u32_le().await else { return };
    if length as usize > REQUEST_BYTES_MAX {
        return;
    }
    let mut request = vec![0; length as usize];
    if recv.read_exact(&mut request).await.is_err() {
        return;
    }
    let (sender, mut parts) = mpsc::channel(BLOCKS_AHEAD);
    server.serve(from, request.into(), Reply(sender));
    while let Some(part) = parts.recv().await {
        let written = match part {
            Part::Block(bytes) => {
                throttle.take(bytes.len()).await;
                put_block(&mut send, bytes.len() as u32, &bytes).await
            }
            Part::End => put_block(&mut send, END, &[]).await,
            Part::Failed(why) => {
                let text = &why.as_bytes()[..why.len().min(ERROR_BYTES_MAX)];
                let mut body = (text.len() as u32).to_le_bytes().to_vec();
                body.extend_from_slice(text);
                put_block(&mut send, FAILED, &body).await
            }
        };
        if written.is_err() {
            return;
        }
    }
    let _ = send.shutdown().await;
}

async fn put_block<W: AsyncWrite + Unpin>(send: &mut W, length: u32, bytes: &[u8]) -> std::io::Result<()> {
    send.write_all(&length.to_le_bytes()).await?;
    send.write_all(bytes).await
}

/// The requesting end: yields the blocks of the response as they arrive.
pub struct Response {
    recv: Box<dyn AsyncRead + Send + Unpin>,
    done: bool,
}

impl Response {
    pub(crate) fn new(recv: impl AsyncRead + Send + Unpin + 'static) -> Self {
        Self { recv: Box::new(recv), done: false }
    }

    /// The next block (at most [`BLOCK_BYTES_MAX`]), or `None` at the end of the response.
    ///
    /// # Errors
    /// The server reported an error, or the response was truncated.
    pub async fn block(&mut self) -> Result<Option<Bytes>, RequestError> {
        if self.done {
            return Ok(None);
        }
        match self.recv.read_u32_le().await.map_err(|_| RequestError::Truncated)? {
            END => {
                self.done = true;
                Ok(None)
            }
            FAILED => Err(self.failure().await),
            length if length as usize <= BLOCK_BYTES_MAX => {
                let mut block = vec![0; length as usize];
                self.recv.read_exact(&mut block).await.map_err(|_| RequestError::Truncated)?;
                Ok(Some(block.into()))
            }
            length => Err(RequestError::Block { bytes: length }),
        }
    }

    /// The whole response, if it is at most `bytes_max` long.
    ///
    /// # Errors
    /// As for `block`, and for a longer response.
    pub async fn all(mut self, bytes_max: usize) -> Result<Vec<u8>, RequestError> {
        let mut all = Vec::new();
        while let Some(block) = self.block().await? {
            if block.len() > bytes_max - all.len() {
                return Err(RequestError::Answer { bytes_max });
            }
            all.extend_from_slice(&block);
        }
        Ok(all)
    }

    async fn failure(&mut self) -> RequestError {
        let Ok(length) = self.recv.read_u32_le().await else { return RequestError::Truncated };
        let mut text = vec![0; (length as usize).min(ERROR_BYTES_MAX)];
        match self.recv.read_exact(&mut text).await {
            Ok(_) => RequestError::Rejected(crate::wire::printable(&String::from_utf8_lossy(&text), ERROR_BYTES_MAX)),
            Err(_) => RequestError::Truncated,
        }
    }
}

impl std::fmt::Debug for Response {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Response")
    }
}

/// Why a request failed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum RequestError {
    /// No connection to that node.
    #[error("not connected to that node")]
    NotConnected,
    /// The request exceeds [`REQUEST_BYTES_MAX`].
    #[error("a request of {bytes} bytes, at most {REQUEST_BYTES_MAX} are allowed")]
    TooLong {
        /// Length of the request.
        bytes: usize,
    },
    /// The peer answered with an error.
    #[error("the peer rejected the request: {0}")]
    Rejected(String),
    /// The connection or the peer's work ended before the response was complete.
    #[error("the answer was cut off")]
    Truncated,
    /// A block exceeds [`BLOCK_BYTES_MAX`].
    #[error("a block of {bytes} bytes, at most {BLOCK_BYTES_MAX} are allowed")]
    Block {
        /// Declared length.
        bytes: u32,
    },
    /// The response exceeds the caller's bound.
    #[error("an answer longer than the {bytes_max} bytes expected")]
    Answer {
        /// The bound.
        bytes_max: usize,
    },
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::duplex;

    /// Sends a request over in-memory streams and reads the response.
    async fn exchange(server: impl Serve, request: &[u8], bytes_max: usize) -> Result<Vec<u8>, RequestError> {
        let (ask_end, answer_end) = duplex(100_000);
        let (recv, send) = tokio::io::split(ask_end);
        let (their_recv, their_send) = tokio::io::split(answer_end);
        let throttle = Throttle::default();
        let answering = answer(their_send, their_recv, [7; 16], &server, &throttle);
        let asking = async {
            ask(send, request).await?;
            Response::new(recv).all(bytes_max).await
        };
        tokio::join!(answering, asking).1
    }

    #[tokio::test]
    async fn long_answers_arrive_whole() {
        let long: Vec<u8> = (0..3 * BLOCK_BYTES_MAX + 5).map(|i| (i % 251) as u8).collect();
        let copy = Bytes::from(long.clone());
        let server = move |from: NodeId, request: Bytes, reply: Reply| {
            assert_eq!((from, &request[..]), ([7; 16], &b"all of it"[..]));
            let copy = copy.clone();
            std::thread::spawn(move || {
                assert!(reply.blocking_send(copy));
                reply.finish();
            });
        };
        assert_eq!(exchange(server, b"all of it", usize::MAX).await, Ok(long));
    }

    #[tokio::test]
    async fn rejection_truncation_and_excess_are_distinct_errors() {
        let refuse = |_: NodeId, _: Bytes, reply: Reply| reply.fail("no such chunk");
        assert_eq!(exchange(refuse, b"", 10).await, Err(RequestError::Rejected("no such chunk".into())));
        let cut = |_: NodeId, _: Bytes, reply: Reply| {
            tokio::spawn(async move { reply.send(Bytes::from_static(b"half")).await });
        };
        assert_eq!(exchange(cut, b"", 10).await, Err(RequestError::Truncated));
        let more = |_: NodeId, _: Bytes, reply: Reply| {
            tokio::spawn(async move {
                reply.send(Bytes::from_static(&[0; 11])).await;
                reply.finish();
            });
        };
        assert_eq!(exchange(more, b"", 10).await, Err(RequestError::Answer { bytes_max: 10 }));
        let never = |_: NodeId, _: Bytes, _: Reply| unreachable!("too long to be sent");
        let long = vec![0; REQUEST_BYTES_MAX + 1];
        assert_eq!(exchange(never, &long, 10).await, Err(RequestError::TooLong { bytes: REQUEST_BYTES_MAX + 1 }));
    }

    #[tokio::test]
    async fn an_oversized_block_is_rejected_before_allocation() {
        let bytes = (BLOCK_BYTES_MAX as u32 + 1).to_le_bytes();
        let mut response = Response::new(std::io::Cursor::new(bytes));
        assert_eq!(response.block().await, Err(RequestError::Block { bytes: BLOCK_BYTES_MAX as u32 + 1 }));
    }
}
