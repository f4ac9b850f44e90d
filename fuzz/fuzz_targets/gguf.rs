//! Fuzzes weight files and shard indexes: no call on a file that opens may panic.
//!
//! An input is used twice: as a file, and as patches to a valid small model, which reach the code after the first checks.
#![no_main]
use bytes::Bytes;
use kernels_models::stage::Activations;
use kernels_models::weights::testing::TinyModel;
use kernels_models::weights::{ModelFile, ShardIndex};
use libfuzzer_sys::fuzz_target;
use std::sync::OnceLock;

fuzz_target!(|data: &[u8]| {
    if let Ok(index) = ShardIndex::decode(data) {
        assert_eq!(index.encode(), data, "decoding is canonical");
    }
    open(data.to_vec());
    open(patched(data));
});

fn open(bytes: Vec<u8>) {
    let Ok(file) = ModelFile::from_bytes(Bytes::from(bytes)) else { return };
    let _ = (file.costs(Activations::Int8), file.stage_ranges(0..1), file.rotary_frequencies(&file.config().rope, 8192));
    for info in file.tensors() {
        let tensor = file.tensor(&info.name).expect("listed");
        assert_eq!(tensor.read(tensor.rows - 1..tensor.rows).expect("in memory").len() as u64, info.row_bytes());
    }
    let index = ShardIndex::build(&file, |_| ()).expect("complete");
    assert!(index.matches(&file));
    if let Ok(tokenizer) = file.tokenizer() {
        let ids = tokenizer.encode("hello <|im_end|> wor\u{e9}ld 123\n", true).unwrap_or_default();
        let _ = tokenizer.decode(&ids);
    }
    if let Ok(template) = file.chat_template() {
        let _ = template.render(&[], true);
    }
}

/// A valid small model, patched by the input's (position, value) pairs.
fn patched(data: &[u8]) -> Vec<u8> {
    static MODEL: OnceLock<(Vec<u8>, usize)> = OnceLock::new();
    let (model, header) = MODEL.get_or_init(|| {
        let mut writer =
            TinyModel { layers: 1, width: 64, heads: 1, kv_heads: 1, ffn: 64, ..TinyModel::default() }.writer();
        writer.text(
            "tokenizer.chat_template",
            "{% for m in messages %}{{ m.content | trim }}{% endfor %}{{ bos_token }}",
        );
        (writer.write(), writer.header().len())
    });
    let mut bytes = model.clone();
    for patch in data.chunks_exact(3) {
        bytes[usize::from(u16::from_le_bytes([patch[0], patch[1]])) % header] = patch[2];
    }
    bytes
}
