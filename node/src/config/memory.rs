//! `--memory`: one size for each device, or sizes by device.
use super::Size;
use kernels::device::{DeviceChoice, DeviceId};
use serde::Deserialize;
use std::fmt;
use std::str::FromStr;

/// Memory limits of devices: `4G`, or `cuda:0=12G,cpu=8G`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryLimits {
    /// Of each device that is not in `of`, in bytes.
    pub each: Option<u64>,
    /// Of single devices, in bytes.
    pub of: Vec<(DeviceId, u64)>,
}

impl MemoryLimits {
    /// The same limit for each device.
    pub fn each(bytes: u64) -> Self {
        Self { each: Some(bytes), of: Vec::new() }
    }
}

impl FromStr for MemoryLimits {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if !text.contains('=') {
            return text.parse::<Size>().map(|size| Self::each(size.0));
        }
        let mut of: Vec<(DeviceId, u64)> = Vec::new();
        for item in text.split(',') {
            let bad = || format!("`{item}`: expected a device and its limit, as in cuda:0=12G");
            let (device, size) = item.split_once('=').ok_or_else(bad)?;
            let id = match device.trim().parse::<DeviceChoice>().map_err(|e| e.to_string())? {
                DeviceChoice::This(id) => id,
                DeviceChoice::Auto => return Err(bad()),
            };
            if of.iter().any(|(known, _)| *known == id) {
                return Err(format!("`{text}` has two limits for {id}: name each device once"));
            }
            of.push((id, size.parse::<Size>()?.0));
        }
        Ok(Self { each: None, of })
    }
}

impl fmt::Display for MemoryLimits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let each = self.each.map(|bytes| Size(bytes).to_string());
        let of = self.of.iter().map(|(id, bytes)| format!("{id}={}", Size(*bytes)));
        f.write_str(&each.into_iter().chain(of).collect::<Vec<_>>().join(","))
    }
}

impl<'de> Deserialize<'de> for MemoryLimits {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Written {
            Bytes(u64),
            Text(String),
        }
        match Written::deserialize(deserializer)? {
            Written::Bytes(bytes) => Ok(Self::each(bytes)),
            Written::Text(text) => text.parse().map_err(serde::de::Error::custom),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_for_each_device_or_by_device() {
        let parsed = |text: &str| text.parse::<MemoryLimits>();
        assert_eq!(parsed("4G"), Ok(MemoryLimits::each(4 << 30)));
        assert_eq!(parsed("0"), Ok(MemoryLimits::each(0)), "a client");
        let of = vec![(DeviceId::Cuda(0), 12 << 30), (DeviceId::Cpu, 8 << 30)];
        assert_eq!(parsed("cuda:0=12G, cpu=8G"), Ok(MemoryLimits { each: None, of }));
        for (wrong, says) in
            [("cuda:0=12G,4G", "expected a device"), ("cpu=1G,cpu=2G", "two limits"), ("auto=1G", "expected a device")]
        {
            let error = parsed(wrong).unwrap_err();
            assert!(error.contains(says), "{wrong}: {error}");
        }
        assert!(parsed("gpu=1G").unwrap_err().contains("not a device name"));
        assert!(parsed("cpu=big").unwrap_err().contains("not a size"));
    }
}
