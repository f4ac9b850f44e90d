//! Runs the GPU self-test on the machine's Vulkan device (Mesa's software device is enough).
use std::panic::catch_unwind;

use cubecl::wgpu::WgpuRuntime;

use super::*;
use crate::check::checks;

type Client = ComputeClient<WgpuRuntime>;

/// `None`, with a note on stderr, if no Vulkan driver is installed and none is required.
fn vulkan() -> Option<Client> {
    let client = catch_unwind(|| WgpuRuntime::client(&Default::default())).ok();
    if client.is_none() {
        let required = std::env::var("MESHNODE_REQUIRE").is_ok_and(|all| all.split(',').any(|one| one == "vulkan"));
        assert!(!required, "MESHNODE_REQUIRE names vulkan, but no Vulkan driver was found");
        eprintln!("SKIPPED: no Vulkan driver on this machine");
    }
    client
}

#[test]
fn matches_the_cpu_and_gives_the_same_bits_for_any_partition() {
    let Some(client) = vulkan() else { return };
    let all = checks(&[client]);
    let wrong: Vec<String> =
        all.iter().filter_map(|check| Some(format!("{}: {}", check.name, check.outcome.as_ref().err()?))).collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
