//! What other members serve: asked of those that are connected.
use super::NodeHandle;
use crate::bulk::BulkRequest;
use crate::directory::{self, Served};
use crate::shell::EndpointAsk;
use crate::transfer::Ask;
use crate::views::PeerView;
use node_core::id::NodeId;
use std::time::Duration;

/// Longest wait for the members' answers: a person waits for the sum of them.
const ANSWER_MAX: Duration = Duration::from_secs(1);
/// Members that are asked at once: one of them serves it in any mesh that people oversee.
const ASKED_MAX: usize = 64;

impl NodeHandle {
    /// Names of members that serve a model of that name, each with where its API listens as it sees it.
    pub(crate) async fn serving_members(&self, model: &str) -> Vec<(String, Served)> {
        let peers = self.inner.driver.views().await.peers;
        let others = peers.into_iter().filter(|peer| !peer.this_node && peer.connected && peer.state == "alive");
        let asked = others.take(ASKED_MAX).map(|peer| self.ask_served(peer));
        let answers = futures::future::join_all(asked).await.into_iter().flatten();
        answers.filter(|(_, served)| served.models.iter().any(|name| name == model)).collect()
    }

    async fn ask_served(&self, peer: PeerView) -> Option<(String, Served)> {
        let node = NodeId(u128::from_str_radix(&peer.node, 16).ok()?.to_be_bytes());
        let ask = EndpointAsk(self.inner.endpoint.clone());
        let answer = ask.ask(node, BulkRequest::Served.encode(), directory::ANSWER_BYTES_MAX);
        let bytes = tokio::time::timeout(ANSWER_MAX, answer).await.ok()?.ok()?;
        Some((peer.name, directory::decode(&bytes)?))
    }

    /// Where a model is served that is not served here, human-readable; none if no member that answers serves it.
    pub async fn served_elsewhere(&self, model: &str) -> Option<String> {
        let members = self.serving_members(model).await;
        let (name, first) = members.first()?;
        let api = first.api.map_or_else(String::new, |api| match api.ip().is_loopback() {
            true => format!(" (on that machine: http://{api}/v1)"),
            false => format!(" (http://{api}/v1)"),
        });
        let others = members.len() - 1;
        let others =
            if others == 0 { String::new() } else { format!(" and {}", crate::views::count(others, "other member")) };
        Some(format!(
            "the model `{model}` is not served by this node, but by the member {name}{others}: send the request to its \
             API{api}, or serve the model here, too, with `meshnode serve {model}`"
        ))
    }

    /// Where the local API listens: members name this address to users who ask for a model that is served here.
    pub fn listens_on(&self, api: std::net::SocketAddr) {
        let _ = self.inner.directory.api.set(api);
    }
}
