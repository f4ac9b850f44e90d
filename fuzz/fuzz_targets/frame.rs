//! Fuzzes data-plane frames: checks a header against a job's expectation, then unpacks the payload.
#![no_main]
use libfuzzer_sys::fuzz_target;
use transport::compress::unpack;
use transport::frame::{Dtype, Expectation, HEADER_BYTES, decode_header};

fuzz_target!(|data: &[u8]| {
    let Some((header, payload)) = data.split_first_chunk::<HEADER_BYTES>() else { return };
    let Ok(raw) = decode_header(header) else { return };
    for expected in [Expectation::hidden(Dtype::F32, 576, 512), Expectation::hidden(Dtype::Rows4, 323, 512), Expectation::tokens(512)] {
        let Ok(incoming) = raw.check(&expected) else { continue };
        let payload = &payload[..incoming.wire_length.min(payload.len())];
        // A wrong checksum does not stop the test: payloads that pass by a collision must be harmless too.
        let _ = incoming.check(payload);
        if let Ok(rows) = unpack(incoming.codec, incoming.head.dtype, payload.to_vec(), incoming.raw_length) {
            assert_eq!(rows.len(), incoming.raw_length);
        }
    }
});
