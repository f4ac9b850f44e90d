//! Measures a link over the data plane: round-trip time by small echoes, throughput by a burst that the receiver times.
use std::{io, time::Duration};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    time::{Instant, timeout},
};

/// Echoes per measurement. The fastest counts, because slower ones include queueing delay.
const ECHOES: usize = 8;
/// Maximum burst in bytes: about 20 ms at 3 Gbit/s.
const BURST_BYTES_MAX: u64 = 8 << 20;
/// Time limit of the burst, which shortens it on a slow link.
const BURST_TIME_MAX: Duration = Duration::from_millis(500);
/// Time limit of the whole measurement.
const TIME_MAX: Duration = Duration::from_secs(5);
/// Bytes per write.
const PIECE: usize = 64 << 10;

/// Result of a measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Link {
    /// Fastest round trip.
    pub rtt: Duration,
    /// Bytes per second in this direction.
    pub bytes_per_second: u64,
}

/// Runs the measuring side.
///
/// # Errors
/// The stream ended or took too long.
pub(crate) async fn measure<W, R>(send: W, recv: R) -> io::Result<Link>
where
    W: AsyncWrite + Unpin,
    R: AsyncRead + Unpin,
{
    timeout(TIME_MAX, run(send, recv)).await.map_err(|_| io::ErrorKind::TimedOut)?
}

async fn run<W: AsyncWrite + Unpin, R: AsyncRead + Unpin>(mut send: W, mut recv: R) -> io::Result<Link> {
    let mut rtt = Duration::MAX;
    for _ in 0..ECHOES {
        let start = Instant::now();
        send.write_u8(ECHO).await?;
        recv.read_u8().await?;
        rtt = rtt.min(start.elapsed());
    }
    send.write_u8(BURST).await?;
    let (start, piece, mut sent) = (Instant::now(), vec![0; PIECE], 0);
    while sent < BURST_BYTES_MAX && start.elapsed() < BURST_TIME_MAX {
        send.write_all(&piece).await?;
        sent += PIECE as u64;
    }
    send.shutdown().await?;
    let (bytes, nanos) = (recv.read_u64_le().await?, recv.read_u64_le().await?);
    Ok(Link { rtt, bytes_per_second: rate(bytes, nanos) })
}

/// Runs the answering side: echoes, then times the burst from its first to its last byte. Returns bytes per second.
pub(crate) async fn answer<W, R>(mut send: W, mut recv: R) -> io::Result<u64>
where
    W: AsyncWrite + Unpin,
    R: AsyncRead + Unpin,
{
    for _ in 0..=2 * ECHOES {
        if recv.read_u8().await? == BURST {
            break;
        }
        send.write_u8(ECHO).await?;
    }
    let mut buffer = vec![0; PIECE];
    let first = recv.read(&mut buffer).await?;
    let (start, mut bytes) = (Instant::now(), 0);
    // The first read only starts the clock.
    while first > 0 && bytes <= 2 * BURST_BYTES_MAX {
        match recv.read(&mut buffer).await? {
            0 => break,
            n => bytes += n as u64,
        }
    }
    let nanos = u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX);
    send.write_u64_le(bytes).await?;
    send.write_u64_le(nanos).await?;
    send.shutdown().await?;
    Ok(rate(bytes, nanos))
}

fn rate(bytes: u64, nanos: u64) -> u64 {
    let bytes_per_second = u128::from(bytes) * 1_000_000_000 / u128::from(nanos.max(1));
    u64::try_from(bytes_per_second).unwrap_or(u64::MAX)
}

const ECHO: u8 = 1;
const BURST: u8 = 2;

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn both_sides_agree() {
        let (a, b) = tokio::io::duplex(1 << 20);
        let ((a_recv, a_send), (b_recv, b_send)) = (tokio::io::split(a), tokio::io::split(b));
        let (link, answered) = tokio::join!(measure(a_send, a_recv), answer(b_send, b_recv));
        let link = link.unwrap();
        assert_eq!(answered.unwrap(), link.bytes_per_second);
        assert!(link.bytes_per_second > 0 && link.rtt < TIME_MAX, "{link:?}");
    }

    #[tokio::test]
    async fn nonsense_ends_the_answer() {
        let (_, b) = tokio::io::duplex(64);
        let (recv, send) = tokio::io::split(b);
        assert!(answer(send, recv).await.is_err());
    }
}
