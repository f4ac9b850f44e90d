//! Bounds the number of connections and closes idle ones; otherwise a few hundred silent sockets could block all
//! callers.
//!
//! A connection is either idle (waiting for a request) or answering one. An answering connection is never closed: a
//! token stream may take hours. An idle one is closed after a timeout, or earlier, longest idle first, to make room for
//! a new caller. A few extra slots are reserved for callers with the node's key.
use super::error::ApiError;
use axum::Router;
use axum::body::{Body, Bytes, HttpBody};
use axum::extract::Request;
use axum::middleware::Next;
use axum::response::Response;
use http_body::{Frame, SizeHint};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use hyper_util::service::TowerToHyperService;
use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::io::{ErrorKind, Write};
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio::task::JoinSet;

/// Connection limits and timeouts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Concurrent connections: enough for running and queued requests of several models and status polls; far below the
    /// usual limit of 1,024 file descriptors per process.
    connections: usize,
    /// Additional slots for callers with the node's key: a user's commands.
    reserve: usize,
    /// Per remote (non-loopback) address: enough for one program with many concurrent requests.
    per_address: usize,
    /// Timeout for the head of a request, and for idle keep-alive connections. Clients that keep connections alive
    /// expect a few seconds.
    head: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self { connections: 384, reserve: 16, per_address: 128, head: Duration::from_secs(10) }
    }
}

/// Serves connections until dropped, which closes them all.
pub(crate) async fn serve(listener: TcpListener, router: Router, limits: Limits) {
    let connections = Arc::new(Connections { limits, open: Mutex::default() });
    let mut running = JoinSet::new();
    loop {
        while running.try_join_next().is_some() {}
        let (stream, peer) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                let of_the_caller = matches!(error.kind(), ErrorKind::ConnectionAborted | ErrorKind::ConnectionReset);
                if !of_the_caller {
                    tracing::warn!("the API cannot accept a connection: {error}");
                    tokio::time::sleep(Duration::from_millis(100)).await; // out of file descriptors: some will close
                }
                continue;
            }
        };
        // Tokens are small, and their latency matters.
        let _ = stream.set_nodelay(true);
        let local = stream.local_addr().unwrap_or(peer);
        match connections.admit(peer.ip().to_canonical(), local) {
            Some((connection, closed)) => {
                running.spawn(answer(stream, router.clone(), connection, closed));
            }
            None => refuse(stream),
        }
    }
}

async fn answer(stream: TcpStream, router: Router, connection: Arc<Connection>, closed: Arc<Notify>) {
    let head = connection.all.limits.head;
    let router = router.layer(axum::Extension(connection));
    let mut builder = Builder::new(TokioExecutor::new()).http1_only();
    builder.http1().timer(TokioTimer::new()).header_read_timeout(head);
    let service = TowerToHyperService::new(router);
    tokio::select! {
        // A caller that disconnects is normal.
        _ = builder.serve_connection(TokioIo::new(stream), service) => {}
        () = closed.notified() => {}
    }
}

/// Sends a 503 with the reason if one write suffices, then closes.
fn refuse(stream: TcpStream) {
    let body = ApiError::crowded().body().to_string();
    let answer = format!(
        "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\nconnection: close\r\ncontent-length: \
         {}\r\n\r\n{body}",
        body.len()
    );
    let _ = stream.into_std().and_then(|mut stream| stream.write(answer.as_bytes()));
}

/// All open connections.
#[derive(Debug)]
struct Connections {
    limits: Limits,
    open: Mutex<Open>,
}

#[derive(Debug, Default)]
struct Open {
    next: u64,
    all: BTreeMap<u64, OpenConnection>,
}

#[derive(Debug)]
struct OpenConnection {
    from: IpAddr,
    /// Idle since; `None` while it answers a request.
    waiting: Option<Instant>,
    closed: Arc<Notify>,
}

impl Connections {
    /// A slot for a new connection and its close signal; `None` if running requests hold all slots.
    fn admit(self: &Arc<Self>, from: IpAddr, local: SocketAddr) -> Option<(Arc<Connection>, Arc<Notify>)> {
        let limits = self.limits;
        let mut open = self.lock();
        let theirs = open.all.values().filter(|entry| entry.from == from).count();
        if !from.is_loopback() && theirs >= limits.per_address && !open.close_one(|entry| entry.from == from) {
            return None;
        }
        let full = open.all.len() >= limits.connections && !open.close_one(|_| true);
        if full && open.all.len() >= limits.connections + limits.reserve {
            return None;
        }
        let (number, closed) = (open.next, Arc::new(Notify::new()));
        open.next += 1;
        open.all.insert(number, OpenConnection { from, waiting: Some(Instant::now()), closed: closed.clone() });
        drop(open);
        Some((Arc::new(Connection { number, local, reserved: full, all: self.clone() }), closed))
    }

    fn lock(&self) -> MutexGuard<'_, Open> {
        self.open.lock()
    }
}

impl Open {
    /// Closes the connection that has been idle longest; `false` if none is idle.
    fn close_one(&mut self, of: impl Fn(&OpenConnection) -> bool) -> bool {
        let waiting = self.all.iter().filter(|(_, entry)| of(entry));
        let longest = waiting.filter_map(|(number, entry)| Some((entry.waiting?, *number))).min();
        let closed = longest.and_then(|(_, number)| self.all.remove(&number));
        closed.map(|entry| entry.closed.notify_one()).is_some()
    }
}

/// A connection as its requests see it. Dropping it frees its slot.
#[derive(Debug)]
pub(crate) struct Connection {
    number: u64,
    local: SocketAddr,
    reserved: bool,
    all: Arc<Connections>,
}

impl Connection {
    /// The address that the caller connected to.
    pub(crate) fn local(&self) -> SocketAddr {
        self.local
    }

    /// Whether it holds one of the slots reserved for callers with a key.
    pub(crate) fn is_reserved(&self) -> bool {
        self.reserved
    }

    fn waits(&self, since: Option<Instant>) {
        if let Some(entry) = self.all.lock().all.get_mut(&self.number) {
            entry.waiting = since;
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.all.lock().all.remove(&self.number);
    }
}

/// Middleware around every request: the connection counts as answering from the end of the request body to the end of
/// the response body.
pub(crate) async fn follow(request: Request, next: Next) -> Response {
    let Some(connection) = request.extensions().get::<Arc<Connection>>().cloned() else {
        return next.run(request).await;
    };
    let answered = Answered(connection.clone());
    let request = request.map(|body| {
        let received = Received { body, connection: Some(connection) };
        Body::new(received.checked())
    });
    let response = next.run(request).await;
    response.map(|body| Body::new(Answer { body, _answered: answered }))
}

/// A request body that marks its connection as answering once it has arrived in full.
struct Received {
    body: Body,
    connection: Option<Arc<Connection>>,
}

impl Received {
    fn checked(mut self) -> Self {
        if self.body.is_end_stream() {
            self.whole();
        }
        self
    }

    fn whole(&mut self) {
        if let Some(connection) = self.connection.take() {
            connection.waits(None);
        }
    }
}

impl HttpBody for Received {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let polled = Pin::new(&mut self.body).poll_frame(cx);
        if matches!(polled, Poll::Ready(None)) || self.body.is_end_stream() {
            self.whole();
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// A response body that marks its connection as idle when it has been written or dropped.
struct Answer {
    body: Body,
    _answered: Answered,
}

impl HttpBody for Answer {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

struct Answered(Arc<Connection>);

impl Drop for Answered {
    fn drop(&mut self) {
        self.0.waits(Some(Instant::now()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HERE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);

    fn table(connections: usize, reserve: usize, per_address: usize) -> Arc<Connections> {
        let limits = Limits { connections, reserve, per_address, head: Duration::from_secs(1) };
        Arc::new(Connections { limits, open: Mutex::default() })
    }

    fn admit(table: &Arc<Connections>, from: IpAddr) -> Option<Arc<Connection>> {
        Some(table.admit(from, "127.0.0.1:1".parse().unwrap())?.0)
    }

    #[test]
    fn silent_connections_are_closed_and_long_answers_are_not() {
        use std::io::Read;
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let head = Duration::from_millis(200);
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
        let address = listener.local_addr().unwrap();
        let long = move || async move {
            let chunks = futures::stream::unfold(0, move |i| async move {
                tokio::time::sleep(head / 2).await;
                (i < 8).then(|| (Ok::<_, std::convert::Infallible>(format!("chunk {i};")), i + 1))
            });
            Body::from_stream(chunks)
        };
        let router = Router::new().route("/", axum::routing::get(long)).layer(axum::middleware::from_fn(follow));
        runtime.spawn(serve(listener, router, Limits { head, ..Limits::default() }));
        let connect = |text: &str| {
            let mut stream = std::net::TcpStream::connect(address).unwrap();
            stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
            stream.write_all(text.as_bytes()).unwrap();
            stream
        };
        let mut answer = String::new();
        connect("GET / HTTP/1.1\r\nHost: x\r\n\r\n").read_to_string(&mut answer).expect("closed once idle again");
        assert!(answer.contains("chunk 7;"), "{answer}");
        for text in ["", "GET / HTTP/1.1\r\nHos"] {
            let mut rest = Vec::new();
            connect(text).read_to_end(&mut rest).expect("closed");
        }
    }

    #[test]
    fn a_new_caller_replaces_the_longest_idle_connection() {
        let table = table(2, 1, 9);
        let [a, b] = [0; 2].map(|_| admit(&table, HERE).unwrap());
        let c = admit(&table, HERE).unwrap();
        assert!(!c.is_reserved());
        assert_eq!(table.lock().all.keys().copied().collect::<Vec<_>>(), [b.number, c.number], "{}", a.number);
        drop((a, b, c));
        assert!(table.lock().all.is_empty());
    }

    #[test]
    fn running_requests_are_never_closed_and_the_last_slots_are_reserved() {
        let table = table(2, 1, 9);
        let running: Vec<_> = (0..2).map(|_| admit(&table, HERE).unwrap()).collect();
        running.iter().for_each(|connection| connection.waits(None));
        let command = admit(&table, HERE).unwrap();
        assert!(command.is_reserved());
        command.waits(None);
        assert!(admit(&table, HERE).is_none());
        running[0].waits(Some(Instant::now()));
        assert!(!admit(&table, HERE).unwrap().is_reserved());
    }

    #[test]
    fn slots_per_remote_address_are_bounded() {
        let table = table(9, 1, 2);
        let far: IpAddr = "10.0.0.7".parse().unwrap();
        let theirs: Vec<_> = (0..2).map(|_| admit(&table, far).unwrap()).collect();
        theirs.iter().for_each(|connection| connection.waits(None));
        assert!(admit(&table, far).is_none());
        assert!(admit(&table, "10.0.0.8".parse().unwrap()).is_some());
        let here: Vec<_> = (0..5).map(|_| admit(&table, HERE)).collect();
        assert!(here.iter().all(Option::is_some), "loopback has no such bound");
    }
}
