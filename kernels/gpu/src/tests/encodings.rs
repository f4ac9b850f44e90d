//! Compares encoded rows with the reference at all kinds of widths.
use cubecl::cuda::CudaRuntime;
use cubecl::prelude::*;
use cubecl::wgpu::WgpuRuntime;
use kernels::boundary::Codec;
use kernels::device::DeviceId;

use super::device;
use crate::platform::Platform;
use crate::selftest::compare_encodings;

#[test]
fn encoded_rows_have_the_bytes_of_the_reference() {
    match device() {
        Some(DeviceId::Cuda(_)) => rows_on(&CudaRuntime::client(&Default::default())),
        Some(_) => rows_on(&WgpuRuntime::client(&Default::default())),
        None => {}
    }
}

fn rows_on<R: Platform>(client: &ComputeClient<R>) {
    // The last one has more blocks than a cube has units.
    for width in [1, 8, 31, 64, 200, 960, 4096, 16_500] {
        for codec in [Codec::F16, Codec::Q8, Codec::Q4] {
            let compared = compare_encodings(client, codec, width);
            compared.unwrap_or_else(|wrong| panic!("{}: {wrong}", codec.name()));
        }
    }
}
