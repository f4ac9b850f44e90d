//! Requests weights from peers over the data plane.
use super::request::Ask;
use node_core::id::NodeId;
use std::sync::Arc;
use std::time::Duration;
use transport::Endpoint;

/// If no frame arrived for this long, no job is generating.
const FRAMES_SILENT: Duration = Duration::from_secs(5);

/// Requests weights over the data plane.
pub(crate) struct EndpointAsk(pub Arc<Endpoint>);

impl Ask for EndpointAsk {
    async fn ask(&self, node: NodeId, request: Vec<u8>, max: usize) -> Result<Vec<u8>, String> {
        let response = self.0.request(node.0, request.into()).await.map_err(|e| e.to_string())?;
        response.all(max).await.map_err(|e| e.to_string())
    }

    /// Each peer stays within its share of its link to this node, but together they could exceed this node's own link.
    /// So while frames of a job are in flight, all of them get the same share of the fastest measured link.
    fn bytes_per_second(&self) -> Option<u64> {
        let peers = self.0.peers();
        let busy = |peer: &transport::PeerStats| peer.since_last_frame.is_some_and(|silent| silent < FRAMES_SILENT);
        let far = || peers.iter().filter(|peer| !peer.addr.ip().to_canonical().is_loopback());
        let measured = far().filter_map(|peer| peer.bytes_per_second_in).max().filter(|_| far().any(busy));
        measured.map(|bytes_per_second| bytes_per_second / 10 * 7)
    }
}
