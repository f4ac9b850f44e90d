//! Fuzzes untrusted credentials: tickets pasted by users and certificates presented by peers.
#![no_main]
use libfuzzer_sys::fuzz_target;
use transport::certificate::{Chain, MeshCredentials};
use transport::ticket::Ticket;

fuzz_target!(|data: &[u8]| {
    if let Ok(text) = std::str::from_utf8(data)
        && let Ok(ticket) = text.parse::<Ticket>()
    {
        let again: Ticket = ticket.to_string().parse().expect("a ticket's own text is a ticket");
        assert_eq!(again.to_string(), ticket.to_string());
    }
    if let Ok(chain) = Chain::decode(data) {
        assert_eq!(chain.encode(), data);
        let _ = (chain.mesh(), chain.own(), chain.expiry());
    }
    let _ = MeshCredentials::decode(data);
});
