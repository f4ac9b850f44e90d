//! One ordered stream to one peer. The caller writes directly; data is queued only under backpressure.
//!
//! A frame of a decode step must not wait for a task to wake up, so `send` writes straight into the stream from the
//! caller's thread. Only what the stream does not accept (flow control, a stream that is not open yet, a payload to be
//! compressed first) goes to a bounded queue, which a task drains.
use bytes::Bytes;
use futures::future::BoxFuture;
use parking_lot::{Mutex, MutexGuard};
use std::{
    collections::VecDeque,
    fmt,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll, Waker},
};
use tokio::runtime::Handle;

/// The operations that a lane needs from the sending half of a stream.
pub(crate) trait Pipe: Send + 'static {
    /// Takes bytes off the front of `bufs`; pending while the stream accepts none.
    fn poll_write(&mut self, cx: &mut Context<'_>, bufs: &mut [Bytes]) -> Poll<Result<(), PipeError>>;
    /// Ends the stream after all written bytes, which still arrive.
    fn finish(&mut self);
    /// Ends the stream and drops unsent bytes.
    fn reset(&mut self);
}

/// Why a stream accepts no more data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PipeError {
    /// The peer stopped the stream.
    Stopped,
    /// The connection has ended.
    Gone,
}

/// Opens a lane's stream on first use.
pub(crate) type Opener<P> = Box<dyn Fn() -> BoxFuture<'static, Result<P, PipeError>> + Send + Sync>;
/// Called once, when the peer stops the stream.
pub(crate) type OnStopped = Box<dyn Fn() + Send + Sync>;

/// A stream with its send queue.
pub(crate) struct Lane<P>(Arc<Inner<P>>);

impl<P> Clone for Lane<P> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

struct Inner<P> {
    state: Mutex<LaneState<P>>,
    open: Opener<P>,
    on_stopped: OnStopped,
    budget: Arc<Budget>,
    runtime: Handle,
}

struct LaneState<P> {
    pipe: Option<P>,
    /// Empty unless `draining`.
    queue: VecDeque<Item>,
    /// A task is draining the queue; only that task touches the pipe.
    draining: bool,
    /// Wakes that task when the lane ends, so that it does not wait forever in a write.
    waker: Option<Waker>,
    ended: Option<PipeError>,
}

/// A unit to send.
pub(crate) enum Item {
    /// Header and payload.
    Ready([Bytes; 2]),
    /// Built on a blocking thread when its turn comes; counts as this many bytes until then.
    Later(usize, Box<dyn FnOnce() -> [Bytes; 2] + Send>),
}

impl Item {
    fn bytes(&self) -> usize {
        match self {
            Item::Ready(bufs) => bufs.iter().map(Bytes::len).sum(),
            Item::Later(bytes, _) => *bytes,
        }
    }
}

/// Why an item was not sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LaneError {
    /// The queue is full because the peer is too slow. The caller resets the connection.
    Full,
    /// The stream has ended.
    Ended(PipeError),
}

impl<P: Pipe> Lane<P> {
    pub(crate) fn new(
        pipe: Option<P>,
        open: Opener<P>,
        on_stopped: OnStopped,
        budget: Arc<Budget>,
        runtime: Handle,
    ) -> Self {
        let state = LaneState { pipe, queue: VecDeque::new(), draining: false, waker: None, ended: None };
        Self(Arc::new(Inner { state: Mutex::new(state), open, on_stopped, budget, runtime }))
    }

    /// Writes `item` and queues what the stream does not accept. Never blocks. Items of one caller stay in order.
    ///
    /// # Errors
    /// The queue is full or the stream ended; `item` is dropped.
    pub(crate) fn send(&self, item: Item) -> Result<(), LaneError> {
        let mut state = self.lock();
        if let Some(error) = state.ended {
            return Err(LaneError::Ended(error));
        }
        let rest = match (item, state.draining) {
            (Item::Ready(bufs), false) => match state.write_now(bufs) {
                Ok(None) => return Ok(()),
                Ok(Some(rest)) => Item::Ready(rest),
                Err(error) => return Err(LaneError::Ended(self.end(state, error))),
            },
            (item, _) => item,
        };
        if !self.0.budget.take(rest.bytes()) {
            return Err(LaneError::Full);
        }
        state.queue.push_back(rest);
        if !state.draining {
            state.draining = true;
            self.0.runtime.spawn(self.clone().drain());
        }
        Ok(())
    }

    /// Ends the stream after the bytes already written; the queue is dropped.
    pub(crate) fn finish(&self) {
        self.stop(Pipe::finish);
    }

    /// Ends the stream and drops unsent bytes.
    pub(crate) fn reset(&self) {
        self.stop(Pipe::reset);
    }

    fn stop(&self, how: impl Fn(&mut P)) {
        let mut state = self.lock();
        if let Some(pipe) = &mut state.pipe {
            how(pipe);
        }
        state.ended.get_or_insert(PipeError::Gone);
        self.drop_queue(&mut state);
        let waker = state.waker.take();
        drop(state);
        waker.into_iter().for_each(Waker::wake);
    }

    /// Writes the queue until it is empty or the stream ends.
    async fn drain(self) {
        loop {
            let step = std::future::poll_fn(|cx| self.poll_drain(cx)).await;
            match step {
                Step::Empty => return,
                Step::Open => {
                    let opened = (self.0.open)().await;
                    let mut state = self.lock();
                    match opened {
                        Ok(pipe) => state.pipe = Some(pipe),
                        Err(error) => {
                            self.end(state, error);
                            return;
                        }
                    }
                }
                Step::Make(bytes, make) => {
                    let made = self.0.runtime.spawn_blocking(make).await;
                    let mut state = self.lock();
                    self.0.budget.give(bytes);
                    if let Ok(bufs) = made {
                        let item = Item::Ready(bufs);
                        // The item was admitted at its raw size, which is never smaller.
                        self.0.budget.take_anyway(item.bytes());
                        state.queue.push_front(item);
                    }
                }
            }
        }
    }

    fn poll_drain(&self, cx: &mut Context<'_>) -> Poll<Step> {
        let mut guard = self.lock();
        loop {
            let state = &mut *guard;
            let (Some(pipe), None) = (&mut state.pipe, state.ended) else {
                let step = if state.ended.is_some() { Step::Empty } else { Step::Open };
                state.draining = state.ended.is_none();
                if state.ended.is_some() {
                    self.drop_queue(state);
                }
                return Poll::Ready(step);
            };
            match state.queue.pop_front() {
                None => {
                    state.draining = false;
                    return Poll::Ready(Step::Empty);
                }
                Some(Item::Later(bytes, make)) => return Poll::Ready(Step::Make(bytes, make)),
                Some(Item::Ready(mut bufs)) => {
                    let before = bufs.iter().map(Bytes::len).sum::<usize>();
                    let written = pipe.poll_write(cx, &mut bufs);
                    let left = bufs.iter().map(Bytes::len).sum::<usize>();
                    self.0.budget.give(before - left);
                    if left > 0 {
                        state.queue.push_front(Item::Ready(bufs));
                    }
                    match written {
                        Poll::Ready(Ok(())) => {}
                        Poll::Pending => {
                            state.waker = Some(cx.waker().clone());
                            return Poll::Pending;
                        }
                        Poll::Ready(Err(error)) => {
                            self.end(guard, error);
                            return Poll::Ready(Step::Empty);
                        }
                    }
                }
            }
        }
    }

    /// Marks the end, empties the queue, and reports a stop by the peer outside the lock.
    fn end(&self, mut state: MutexGuard<'_, LaneState<P>>, error: PipeError) -> PipeError {
        let first = state.ended.is_none();
        let error = *state.ended.get_or_insert(error);
        state.draining = false;
        self.drop_queue(&mut state);
        drop(state);
        if first && error == PipeError::Stopped {
            (self.0.on_stopped)();
        }
        error
    }

    fn drop_queue(&self, state: &mut LaneState<P>) {
        let bytes = state.queue.drain(..).map(|item| item.bytes()).sum();
        self.0.budget.give(bytes);
    }

    fn lock(&self) -> MutexGuard<'_, LaneState<P>> {
        // No code panics while it holds the lock; even then the state would be consistent.
        self.0.state.lock()
    }
}

enum Step {
    Empty,
    Open,
    Make(usize, Box<dyn FnOnce() -> [Bytes; 2] + Send>),
}

impl<P: Pipe> LaneState<P> {
    /// Writes what the pipe accepts and returns the rest.
    fn write_now(&mut self, mut bufs: [Bytes; 2]) -> Result<Option<[Bytes; 2]>, PipeError> {
        let Some(pipe) = &mut self.pipe else { return Ok(Some(bufs)) };
        // A no-op waker suffices: the drain task polls the rest with its own waker.
        let mut cx = Context::from_waker(Waker::noop());
        while bufs.iter().any(|b| !b.is_empty()) {
            match pipe.poll_write(&mut cx, &mut bufs) {
                Poll::Ready(Ok(())) => {}
                Poll::Ready(Err(error)) => return Err(error),
                Poll::Pending => return Ok(Some(bufs)),
            }
        }
        Ok(None)
    }
}

/// Byte limit shared by all queues of one kind to one peer.
pub(crate) struct Budget {
    held: AtomicUsize,
    most: usize,
}

impl Budget {
    pub(crate) fn new(most: usize) -> Self {
        Self { held: AtomicUsize::new(0), most }
    }

    /// Bytes queued now.
    pub(crate) fn held(&self) -> usize {
        self.held.load(Ordering::Relaxed)
    }

    fn take(&self, bytes: usize) -> bool {
        let add = |held: usize| held.checked_add(bytes).filter(|sum| *sum <= self.most);
        self.held.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add).is_ok()
    }

    fn take_anyway(&self, bytes: usize) {
        self.held.fetch_add(bytes, Ordering::Relaxed);
    }

    fn give(&self, bytes: usize) {
        self.held.fetch_sub(bytes, Ordering::Relaxed);
    }
}

impl fmt::Debug for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} bytes", self.held(), self.most)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;
    use tokio::sync::Notify;

    /// A pipe that accepts `room` bytes, then blocks.
    #[derive(Clone, Default)]
    struct Fake(Arc<FakeState>);

    #[derive(Default)]
    struct FakeState {
        inner: Mutex<Stream>,
        stopped: AtomicBool,
        grown: Notify,
    }

    #[derive(Default)]
    struct Stream {
        room: usize,
        written: Vec<u8>,
        waiting: Option<Waker>,
        ended: Option<PipeError>,
    }

    impl Fake {
        fn make_room(&self, bytes: usize) {
            let mut inner = self.0.inner.lock();
            inner.room += bytes;
            if let Some(waker) = inner.waiting.take() {
                waker.wake();
            }
        }

        async fn written(&self, bytes: usize) -> Vec<u8> {
            loop {
                let grown = self.0.grown.notified();
                if self.0.inner.lock().written.len() >= bytes {
                    return self.0.inner.lock().written.clone();
                }
                grown.await;
            }
        }
    }

    impl Pipe for Fake {
        fn poll_write(&mut self, cx: &mut Context<'_>, bufs: &mut [Bytes]) -> Poll<Result<(), PipeError>> {
            let mut inner = self.0.inner.lock();
            if let Some(error) = inner.ended {
                return Poll::Ready(Err(error));
            }
            if inner.room == 0 {
                inner.waiting = Some(cx.waker().clone());
                return Poll::Pending;
            }
            for buf in bufs.iter_mut() {
                let n = buf.len().min(inner.room);
                inner.room -= n;
                let taken = buf.split_to(n);
                inner.written.extend_from_slice(&taken);
            }
            self.0.grown.notify_waiters();
            Poll::Ready(Ok(()))
        }
        fn finish(&mut self) {}
        fn reset(&mut self) {}
    }

    fn lane(pipe: Option<Fake>, later: &Fake, most: usize) -> (Lane<Fake>, Arc<Budget>) {
        let budget = Arc::new(Budget::new(most));
        let (opens, reports) = (later.clone(), later.clone());
        let open: Opener<Fake> = Box::new(move || {
            let pipe = opens.clone();
            Box::pin(async move { Ok(pipe) })
        });
        let on_stopped: OnStopped = Box::new(move || reports.0.stopped.store(true, Ordering::SeqCst));
        (Lane::new(pipe, open, on_stopped, budget.clone(), Handle::current()), budget)
    }

    fn ready(bytes: &[u8]) -> Item {
        Item::Ready([Bytes::copy_from_slice(&bytes[..1]), Bytes::copy_from_slice(&bytes[1..])])
    }

    #[tokio::test]
    async fn written_at_once_while_there_is_room_then_in_order() {
        let pipe = Fake::default();
        let (lane, budget) = lane(Some(pipe.clone()), &pipe, 100);
        pipe.make_room(5);
        lane.send(ready(b"abc")).unwrap();
        assert_eq!(pipe.0.inner.lock().written, b"abc", "no task was needed");
        lane.send(ready(b"defg")).unwrap();
        lane.send(Item::Later(3, Box::new(|| [Bytes::from_static(b"h"), Bytes::from_static(b"i")]))).unwrap();
        lane.send(ready(b"jk")).unwrap();
        assert_eq!(budget.held(), 2 + 3 + 2);
        pipe.make_room(100);
        assert_eq!(pipe.written(11).await, b"abcdefghijk");
        while budget.held() > 0 {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn a_lane_opens_its_stream_when_needed() {
        let pipe = Fake::default();
        let (lane, _) = lane(None, &pipe, 100);
        pipe.make_room(100);
        lane.send(ready(b"abc")).unwrap();
        lane.send(ready(b"def")).unwrap();
        assert_eq!(pipe.written(6).await, b"abcdef");
    }

    #[tokio::test]
    async fn a_full_queue_is_an_error_and_does_not_block() {
        let pipe = Fake::default();
        let (lane, budget) = lane(Some(pipe.clone()), &pipe, 10);
        lane.send(ready(&[1; 8])).unwrap();
        assert_eq!(lane.send(ready(&[2; 3])), Err(LaneError::Full));
        lane.reset();
        assert_eq!(budget.held(), 0);
        assert_eq!(lane.send(ready(&[3; 3])), Err(LaneError::Ended(PipeError::Gone)));
    }

    #[tokio::test]
    async fn a_stop_is_reported() {
        let pipe = Fake::default();
        let (lane, budget) = lane(Some(pipe.clone()), &pipe, 10);
        lane.send(ready(b"abc")).unwrap();
        pipe.0.inner.lock().ended = Some(PipeError::Stopped);
        tokio::task::yield_now().await;
        pipe.make_room(1);
        while !pipe.0.stopped.load(Ordering::SeqCst) {
            tokio::task::yield_now().await;
        }
        assert_eq!(lane.send(ready(b"abc")), Err(LaneError::Ended(PipeError::Stopped)));
        assert_eq!(budget.held(), 0);
    }
}
