//! The clocks of this machine: one for the core, which counts suspended time, and the wall clock for dates.
use node_core::time::Instant;

/// Nanoseconds of CLOCK_BOOTTIME: it counts suspended time, so that a resumed laptop sees that its leases have expired.
pub(crate) fn now() -> Instant {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    Instant(u64::try_from(t.tv_sec).unwrap_or(0) * 1_000_000_000 + u64::try_from(t.tv_nsec).unwrap_or(0))
}

/// Seconds since 1970, as the dates of certificates, tickets and bans.
pub(crate) fn unix_seconds() -> u64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_secs())
}
