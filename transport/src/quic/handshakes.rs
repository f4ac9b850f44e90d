//! Bounds the handshakes in progress with peers that are not authenticated yet, in total and by source address.
use parking_lot::{Mutex, MutexGuard};
use std::{
    collections::BTreeMap,
    net::{IpAddr, Ipv6Addr},
    sync::Arc,
};

/// Concurrent handshakes above which callers must validate their address, which a flood from forged addresses cannot.
pub(super) const HANDSHAKES_FREE: usize = 32;
/// Maximum concurrent handshakes.
const HANDSHAKES_MAX: usize = 256;
/// Maximum concurrent handshakes per source: an IPv4 address, or an IPv6 /64 network, which one machine can fill. More
/// than `HANDSHAKES_FREE`, so that forged addresses cannot use up another machine's share; enough for a rack of nodes
/// behind one address.
const HANDSHAKES_PER_SOURCE: usize = 64;

/// Handshakes in progress, by source. A slot is released when its guard is dropped, however the task ends.
#[derive(Debug, Default)]
pub(super) struct Handshakes(Mutex<BTreeMap<IpAddr, usize>>);

/// A handshake in progress; dropping it releases its slot.
#[derive(Debug)]
pub(super) struct Handshake {
    table: Arc<Handshakes>,
    source: IpAddr,
}

impl Handshakes {
    pub(super) fn running(&self) -> usize {
        self.table().values().sum()
    }

    /// `None` while the total or the source's limit is reached.
    pub(super) fn begin(table: &Arc<Self>, from: IpAddr) -> Option<Handshake> {
        let source = source(from);
        let mut running = table.table();
        let (all, here) = (running.values().sum::<usize>(), running.get(&source).copied().unwrap_or(0));
        if all >= HANDSHAKES_MAX || here >= HANDSHAKES_PER_SOURCE {
            return None;
        }
        running.insert(source, here + 1);
        Some(Handshake { table: table.clone(), source })
    }

    fn table(&self) -> MutexGuard<'_, BTreeMap<IpAddr, usize>> {
        // Every change is a single step.
        self.0.lock()
    }
}

impl Drop for Handshake {
    fn drop(&mut self) {
        let mut running = self.table.table();
        match running.get_mut(&self.source) {
            Some(here) if *here > 1 => *here -= 1,
            Some(_) | None => drop(running.remove(&self.source)),
        }
    }
}

/// The part of an address that one machine cannot vary.
fn source(ip: IpAddr) -> IpAddr {
    match ip.to_canonical() {
        IpAddr::V4(ip) => ip.into(),
        IpAddr::V6(ip) => Ipv6Addr::from_bits(ip.to_bits() & !u128::from(u64::MAX)).into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn one_address_cannot_take_all_handshake_slots() {
        let table = Arc::new(Handshakes::default());
        let mut held: Vec<Handshake> =
            std::iter::from_fn(|| Handshakes::begin(&table, ip("192.0.2.1"))).take(HANDSHAKES_MAX).collect();
        assert_eq!(held.len(), HANDSHAKES_PER_SOURCE);
        assert!(Handshakes::begin(&table, ip("::ffff:192.0.2.1")).is_none(), "the same machine");
        held.extend(
            (1..=HANDSHAKES_PER_SOURCE).map(|i| {
                Handshakes::begin(&table, ip(&format!("2001:db8::{i:x}"))).expect("another machine is admitted")
            }),
        );
        assert!(Handshakes::begin(&table, ip("2001:db8::ffff")).is_none(), "one network of 64 bits is one source");
        held.push(Handshakes::begin(&table, ip("2001:db8:0:1::1")).expect("another network"));
        held.clear();
        assert!(table.running() == 0 && table.table().is_empty(), "no state remains of past sources");
    }

    #[test]
    fn a_panic_during_a_greeting_releases_the_slot() {
        let table = Arc::new(Handshakes::default());
        let slot = Handshakes::begin(&table, ip("192.0.2.1")).unwrap();
        let panicked = std::thread::spawn(move || {
            let _slot = slot;
            panic!("planned");
        });
        assert!(panicked.join().is_err());
        assert_eq!(table.running(), 0);
    }
}
