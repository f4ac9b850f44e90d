//! Nodes and single devices, for what is lost or must not be used: a node is lost with all its devices, a device alone.
use crate::id::NodeId;
use alloc::collections::BTreeSet;
use partitioner::DeviceId;

/// A node with all its devices, or one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Place {
    /// The node, with all its devices.
    Node(NodeId),
    /// One device.
    Device(DeviceId),
}

impl Place {
    /// Its node, or the device's.
    pub fn node(self) -> NodeId {
        match self {
            Place::Node(node) => node,
            Place::Device(device) => device.into(),
        }
    }
}

/// A set of nodes and devices.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PlaceSet(BTreeSet<Place>);

impl PlaceSet {
    /// Whether a device is in the set, alone or with its node.
    pub fn has(&self, device: DeviceId) -> bool {
        self.0.contains(&Place::Device(device)) || self.0.contains(&Place::Node(device.into()))
    }

    /// Whether a node or one of its devices is in the set.
    pub fn touches(&self, node: NodeId) -> bool {
        self.0.iter().any(|place| place.node() == node)
    }

    /// Whether the set has nothing in it.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds a node or a device. Returns whether it is new.
    pub fn insert(&mut self, place: Place) -> bool {
        self.0.insert(place)
    }

    /// Removes all.
    pub fn clear(&mut self) {
        self.0.clear();
    }

    /// All nodes and devices in the set.
    pub fn iter(&self) -> impl Iterator<Item = Place> + '_ {
        self.0.iter().copied()
    }
}

impl FromIterator<Place> for PlaceSet {
    fn from_iter<I: IntoIterator<Item = Place>>(places: I) -> Self {
        PlaceSet(places.into_iter().collect())
    }
}

impl FromIterator<NodeId> for PlaceSet {
    fn from_iter<I: IntoIterator<Item = NodeId>>(nodes: I) -> Self {
        nodes.into_iter().map(Place::Node).collect()
    }
}

impl FromIterator<DeviceId> for PlaceSet {
    fn from_iter<I: IntoIterator<Item = DeviceId>>(devices: I) -> Self {
        devices.into_iter().map(Place::Device).collect()
    }
}

impl Extend<Place> for PlaceSet {
    fn extend<I: IntoIterator<Item = Place>>(&mut self, places: I) {
        self.0.extend(places);
    }
}
