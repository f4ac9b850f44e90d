//! Requests with long answers (weights, manifests): a short question on a stream of its own, the answer in blocks, an
//! end mark that tells a whole answer from a cut one.
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
/// Largest block of an answer: a chunk of a shard index.
pub const BLOCK_BYTES_MAX: usize = 1 << 20;
/// Blocks made ahead of the network.
const BLOCKS_AHEAD: usize = 2;
/// Largest error text.
const ERROR_BYTES_MAX: usize = 1 << 10;
/// Instead of a block's length: the answer is whole.
const END: u32 = 0;
/// Instead of a block's length: an error text follows.
const FAILED: u32 = u32::MAX;

/// Who answers requests of members. Called on a network task: long work belongs on a thread, with the reply.
pub trait Serve: Send + Sync + 'static {
    /// Answers `request` through `reply`.
    fn serve(&self, from: NodeId, request: Bytes, reply: Reply);
}

impl<F: Fn(NodeId, Bytes, Reply) + Send + Sync + 'static> Serve for F {
    fn serve(&self, from: NodeId, request: Bytes, reply: Reply) {
        self(from, request, reply);
    }
}

/// The answering end of a request. Dropping it before `finish` tells the other side that the answer is cut.
#[derive(Debug)]
pub struct Reply(mpsc::Sender<Part>);

#[derive(Debug)]
enum Part {
    Block(Bytes),
    End,
    Failed(String),
}

impl Reply {
    /// Sends the next part of the answer; waits while the network is behind. `false` once nobody wants it any more.
    pub async fn send(&self, bytes: Bytes) -> bool {
        for block in blocks(bytes) {
            if self.0.send(Part::Block(block)).await.is_err() {
                return false;
            }
        }
        true
    }

    /// The same from a thread outside the runtime.
    ///
    /// # Panics
    /// On a thread of the runtime, as tokio's blocking calls do.
    pub fn blocking_send(&self, bytes: Bytes) -> bool {
        blocks(bytes).all(|block| self.0.blocking_send(Part::Block(block)).is_ok())
    }

    /// The answer is whole. Waits for its turn on a task of the runtime.
    pub fn finish(self) {
        self.last(Part::End);
    }

    /// There is no answer (or no more of it), and why.
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

/// Sends a request; the answer is read from `Response`.
pub(crate) async fn ask<W: AsyncWrite + Unpin>(mut send: W, request: &[u8]) -> Result<(), RequestError> {
    if request.len() > REQUEST_BYTES_MAX {
        return Err(RequestError::TooLong { bytes: request.len() });
    }
    let mut bytes = Vec::with_capacity(4 + request.len());
    crate::wire::put_long(&mut bytes, request);
    send.write_all(&bytes).await.map_err(|_| RequestError::Cut)?;
    send.shutdown().await.map_err(|_| RequestError::Cut)
}

/// Reads a request, has it served, and writes the answer at the throttle's pace.
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
    let (tell, mut told) = mpsc::channel(BLOCKS_AHEAD);
    server.serve(from, request.into(), Reply(tell));
    while let Some(part) = told.recv().await {
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

/// The asking end: blocks of the answer as they arrive.
pub struct Response {
    recv: Box<dyn AsyncRead + Send + Unpin>,
    done: bool,
}

impl Response {
    pub(crate) fn new(recv: impl AsyncRead + Send + Unpin + 'static) -> Self {
        Self { recv: Box::new(recv), done: false }
    }

    /// The next block (at most [`BLOCK_BYTES_MAX`]), or `None` once the answer is whole.
    ///
    /// # Errors
    /// The server said why not, or the answer was cut.
    pub async fn block(&mut self) -> Result<Option<Bytes>, RequestError> {
        if self.done {
            return Ok(None);
        }
        match self.recv.read_u32_le().await.map_err(|_| RequestError::Cut)? {
            END => {
                self.done = true;
                Ok(None)
            }
            FAILED => Err(self.failure().await),
            length if length as usize <= BLOCK_BYTES_MAX => {
                let mut block = vec![0; length as usize];
                self.recv.read_exact(&mut block).await.map_err(|_| RequestError::Cut)?;
                Ok(Some(block.into()))
            }
            length => Err(RequestError::Block { bytes: length }),
        }
    }

    /// The whole answer, if it is at most `bytes_max` long.
    ///
    /// # Errors
    /// As `block`, and for an answer that is longer.
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
        let Ok(length) = self.recv.read_u32_le().await else { return RequestError::Cut };
        let mut text = vec![0; (length as usize).min(ERROR_BYTES_MAX)];
        match self.recv.read_exact(&mut text).await {
            Ok(_) => RequestError::Refused(crate::wire::printable(&String::from_utf8_lossy(&text), ERROR_BYTES_MAX)),
            Err(_) => RequestError::Cut,
        }
    }
}

impl std::fmt::Debug for Response {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Response")
    }
}

/// Why there is no answer.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum RequestError {
    /// No connection to that node.
    #[error("not connected to that node")]
    NotConnected,
    /// More than a request may hold.
    #[error("a request of {bytes} bytes, at most {REQUEST_BYTES_MAX} are allowed")]
    TooLong {
        /// Its length.
        bytes: usize,
    },
    /// The peer said why not.
    #[error("the peer refused: {0}")]
    Refused(String),
    /// The connection or the peer's work ended before the answer did.
    #[error("the answer was cut off")]
    Cut,
    /// A block larger than blocks are.
    #[error("a block of {bytes} bytes, at most {BLOCK_BYTES_MAX} are allowed")]
    Block {
        /// Its declared length.
        bytes: u32,
    },
    /// More than was asked for.
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

    /// Asks over in-memory streams and reads the answer.
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
    async fn refusals_cuts_and_excess_are_told_apart() {
        let refuse = |_: NodeId, _: Bytes, reply: Reply| reply.fail("no such chunk");
        assert_eq!(exchange(refuse, b"", 10).await, Err(RequestError::Refused("no such chunk".into())));
        let cut = |_: NodeId, _: Bytes, reply: Reply| {
            tokio::spawn(async move { reply.send(Bytes::from_static(b"half")).await });
        };
        assert_eq!(exchange(cut, b"", 10).await, Err(RequestError::Cut));
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
    async fn an_oversized_block_is_refused_before_it_is_allocated() {
        let bytes = (BLOCK_BYTES_MAX as u32 + 1).to_le_bytes();
        let mut response = Response::new(std::io::Cursor::new(bytes));
        assert_eq!(response.block().await, Err(RequestError::Block { bytes: BLOCK_BYTES_MAX as u32 + 1 }));
    }
}
