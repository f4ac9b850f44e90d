//! Members and their devices, as the API shows them.
use super::{hex, shown};
use node_core::config::DeviceCapacity;
use node_core::membership::MemberState;
use node_core::message::Advert;
use node_core::node::Node;
use node_core::work::DownReason;
use serde::{Deserialize, Serialize};

/// A member.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct PeerView {
    /// Node id, hex.
    pub node: String,
    /// Name.
    pub name: String,
    /// PeerId.
    pub peer_id: String,
    /// "alive", "suspect", "left", "down", "banned".
    pub state: String,
    /// Whether it is this node.
    pub this_node: bool,
    /// Description of its device, or of all its devices.
    pub device: String,
    /// Its devices.
    pub devices: Vec<DeviceView>,
    /// Configured failure domain; empty: unknown.
    pub zone: String,
    /// Bytes of memory offered to the mesh.
    pub memory_total: u64,
    /// Bytes of it that are free.
    pub memory_free: u64,
    /// Bytes of RAM offered to experts beside its GPUs.
    pub ram_total: u64,
    /// Bytes of it that are free.
    pub ram_free: u64,
    /// Of its first device: measured decode speed, in bytes of weights per second; 0: not measured.
    pub bytes_per_second: u64,
    /// Measured prefill speed, in flops per second; 0: not measured.
    pub flops_per_second: u64,
    /// Measured attention speed, in bytes of keys and values per second; 0: not measured.
    pub cache_bytes_per_second: u64,
    /// Round-trip time in milliseconds, if measured.
    pub rtt_ms: Option<f64>,
    /// Bandwidth of the link to it in bytes per second, if measured.
    pub link_bytes_per_second: Option<u64>,
    /// Whether there is a data-plane connection.
    pub connected: bool,
    /// Whether it accepts no new work.
    pub draining: bool,
    /// Data-plane addresses.
    pub addrs: Vec<String>,
}

/// A device of a node.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct DeviceView {
    /// Its name within the machine, such as "cuda:1".
    pub label: String,
    /// Description, the label included.
    pub device: String,
    /// Bytes of memory offered to the mesh.
    pub memory_total: u64,
    /// Bytes of it that are free.
    pub memory_free: u64,
    /// Bytes of RAM offered to experts of its stages.
    pub ram_total: u64,
    /// Bytes of it that are free.
    pub ram_free: u64,
    /// Measured decode speed of experts in RAM, in bytes of weights per second; 0: not measured.
    pub ram_bytes_per_second: u64,
    /// Measured decode speed, in bytes of weights per second; 0: not measured.
    pub bytes_per_second: u64,
    /// Measured prefill speed, in flops per second; 0: not measured.
    pub flops_per_second: u64,
    /// Measured attention speed, in bytes of keys and values per second; 0: not measured.
    pub cache_bytes_per_second: u64,
    /// The machine no longer has it.
    pub gone: bool,
}

/// Members for the API, with the transport's measurements; this node first.
pub(super) fn peer_views(node: &Node) -> Vec<PeerView> {
    let own = peer_view(node.membership().own(), "alive");
    let own = PeerView { this_node: true, ..own };
    let others = node.members().map(|m| {
        let state = match m.state {
            MemberState::Alive => "alive",
            MemberState::Suspect => "suspect",
            MemberState::Down(DownReason::Left) => "left",
            MemberState::Down(DownReason::Failed) => "down",
        };
        match m.advert {
            Some(advert) => PeerView {
                connected: m.connected,
                rtt_ms: m.rtt_ns.map(|ns| ns as f64 / 1e6),
                link_bytes_per_second: m.bytes_per_second,
                ..peer_view(advert, state)
            },
            None => {
                PeerView { node: hex(&m.node), state: state.to_owned(), connected: m.connected, ..PeerView::default() }
            }
        }
    });
    std::iter::once(own).chain(others).collect()
}

/// The view of a member's advert.
fn peer_view(advert: &Advert, state: &str) -> PeerView {
    let capacity = &advert.capacity;
    let texts: Vec<String> = capacity.devices.iter().map(|device| shown(&device.device)).collect();
    let first = capacity.device(0).cloned().unwrap_or_default();
    PeerView {
        node: hex(&advert.node),
        name: shown(&advert.name),
        peer_id: transport::PeerId::from_bytes(&advert.peer_id).map(|p| p.to_string()).unwrap_or_default(),
        state: state.to_owned(),
        device: texts.join(", "),
        devices: capacity.devices.iter().map(device_view).collect(),
        zone: shown(&capacity.zone),
        memory_total: capacity.memory_total(),
        memory_free: capacity.memory_free(),
        ram_total: capacity.ram_total(),
        ram_free: capacity.ram_free(),
        bytes_per_second: first.bytes_per_second,
        flops_per_second: first.flops_per_second,
        cache_bytes_per_second: first.cache_bytes_per_second,
        draining: advert.draining,
        addrs: advert.data_addrs.iter().map(ToString::to_string).collect(),
        ..PeerView::default()
    }
}

fn device_view(device: &DeviceCapacity) -> DeviceView {
    DeviceView {
        label: shown(device.label()),
        device: shown(&device.device),
        memory_total: device.memory_total,
        memory_free: device.memory_free,
        ram_total: device.ram_total,
        ram_free: device.ram_free,
        ram_bytes_per_second: device.ram_bytes_per_second,
        bytes_per_second: device.bytes_per_second,
        flops_per_second: device.flops_per_second,
        cache_bytes_per_second: device.cache_bytes_per_second,
        gone: device.gone,
    }
}
