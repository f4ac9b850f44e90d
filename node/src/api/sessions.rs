//! Browser sessions: `meshnode open` prints a link with a short-lived single-use token. The page exchanges it for a
//! session key, which the browser keeps for that origin until the tab closes.
//!
//! It is not a cookie, because a browser sends cookies to every port of a host, and so to other users' programs on this
//! machine. The token is in the fragment of the link, which a browser sends to no server.
use crate::api_key::ApiKey;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Lifetime of a link: enough to copy it into a browser.
pub(super) const LINK_TTL: Duration = Duration::from_secs(5 * 60);
/// Lifetime of a session: a working day.
const SESSION_TTL: Duration = Duration::from_secs(12 * 3600);
/// Most links, and most sessions: one user has few. The oldest is dropped.
const EACH_MAX: usize = 16;

/// Unused links, and sessions that may administer the node.
#[derive(Debug, Default)]
pub(crate) struct Sessions {
    links: Mutex<VecDeque<(ApiKey, Instant)>>,
    pages: Mutex<VecDeque<(ApiKey, Instant)>>,
}

impl Sessions {
    /// A new token for a link.
    pub(super) fn link(&self, now: Instant) -> Result<ApiKey, String> {
        add(&self.links, now + LINK_TTL)
    }

    /// A session key, if `token` belongs to an unused link that has not expired.
    pub(super) fn begin(&self, token: &str, now: Instant) -> Option<Result<ApiKey, String>> {
        let mut links = self.links.lock();
        links.retain(|(_, end)| *end > now);
        let at = links.iter().position(|(link, _)| link.is(token))?;
        links.remove(at);
        Some(add(&self.pages, now + SESSION_TTL))
    }

    /// Whether `key` belongs to a session that has not expired.
    pub(crate) fn holds(&self, key: &str) -> bool {
        self.holds_at(key, Instant::now())
    }

    fn holds_at(&self, key: &str, now: Instant) -> bool {
        let pages = self.pages.lock();
        pages.iter().any(|(page, end)| *end > now && page.is(key))
    }
}

fn add(list: &Mutex<VecDeque<(ApiKey, Instant)>>, end: Instant) -> Result<ApiKey, String> {
    let key = ApiKey::random()?;
    let mut list = list.lock();
    while list.len() >= EACH_MAX {
        list.pop_front();
    }
    list.push_back((key.clone(), end));
    Ok(key)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_is_valid_once_and_for_five_minutes() {
        let (sessions, now) = (Sessions::default(), Instant::now());
        let link = sessions.link(now).unwrap();
        assert!(sessions.begin("other", now).is_none());
        let key = sessions.begin(link.as_str(), now).unwrap().unwrap();
        assert!(sessions.begin(link.as_str(), now).is_none(), "it was used");
        assert!(sessions.holds_at(key.as_str(), now) && !sessions.holds_at(link.as_str(), now));
        assert!(!sessions.holds_at(key.as_str(), now + SESSION_TTL));
        let late = sessions.link(now).unwrap();
        assert!(sessions.begin(late.as_str(), now + LINK_TTL).is_none());
    }

    #[test]
    fn links_and_sessions_are_bounded() {
        let (sessions, now) = (Sessions::default(), Instant::now());
        let first = sessions.link(now).unwrap();
        (0..EACH_MAX).for_each(|_| drop(sessions.link(now).unwrap()));
        assert!(sessions.begin(first.as_str(), now).is_none(), "the oldest was dropped");
        assert_eq!(sessions.links.lock().len(), EACH_MAX);
    }
}
