//! Tests of the shard index: it covers every byte once, has the same id everywhere, and rejects malicious encodings.
use std::sync::atomic::{AtomicU64, Ordering};

use kernels::quant::QuantType;

use super::{CHUNK_BYTES_MAX, Content, IndexError, ShardIndex};
use crate::weights::ModelFile;
use crate::weights::testing::{TinyModel, real_model_path};

fn index(file: &ModelFile) -> ShardIndex {
    ShardIndex::build(file, |_| ()).expect("a complete file")
}

fn check(file: &ModelFile) {
    let done = AtomicU64::new(0);
    let index = ShardIndex::build(file, |bytes| _ = done.fetch_add(bytes, Ordering::Relaxed)).expect("complete");
    assert_eq!(done.into_inner(), file.file_len());
    let mut at = 0;
    for (number, chunk) in index.chunks().iter().enumerate() {
        assert_eq!(chunk.range.start, at);
        assert!(chunk.range.end > at && chunk.range.end - at <= CHUNK_BYTES_MAX);
        at = chunk.range.end;
        let bytes = file.read(&chunk.range).expect("readable");
        assert!(index.verify(number, &bytes));
        let mut corrupted = bytes.to_vec();
        corrupted[bytes.len() / 2] ^= 4;
        assert!(!index.verify(number, &corrupted), "a flipped bit");
        assert!(!index.verify(number, &bytes[1..]), "a byte short");
        if let Content::Rows { tensor, rows } = &chunk.content {
            let tensor = &file.tensors()[*tensor as usize];
            assert_eq!(chunk.range.start, tensor.range.start + rows.start * tensor.row_bytes());
            assert!(rows.end <= tensor.rows as u64);
        }
    }
    assert_eq!(at, file.file_len());
    assert!(!index.verify(index.chunks().len(), b""));
    assert!(index.matches(file));
    let decoded = ShardIndex::decode(&index.encode()).expect("round trip");
    assert_eq!(decoded, index);
    assert_eq!(decoded.content_id(), index.content_id());
    let json = serde_json::to_vec(&index).expect("serialises");
    assert_eq!(serde_json::from_slice::<ShardIndex>(&json).expect("deserialises"), index);
}

#[test]
fn an_index_covers_the_file() {
    for quant in [QuantType::F32, QuantType::Q4_1, QuantType::Q6K] {
        // F32 of width 1024 has tensors of several chunks.
        check(&TinyModel { quant, layers: 2, width: 1024, ..TinyModel::default() }.open());
    }
    // Bytes before the first and after the last tensor also belong to chunks.
    let mut bytes = TinyModel::default().writer().write();
    bytes.extend(vec![7; 3 << 20]);
    check(&ModelFile::from_bytes(bytes.into()).expect("opens"));
    let mut gap = TinyModel::default().writer();
    let mut at = 4096;
    for tensor in gap.tensors_mut() {
        tensor.offset = Some(at);
        at += (tensor.bytes.len() as u64).next_multiple_of(32);
    }
    let mut bytes = gap.write();
    bytes.extend(vec![0; 4096]);
    check(&ModelFile::from_bytes(bytes.into()).expect("opens"));
    if let Some(path) = real_model_path() {
        check(&ModelFile::open(&path).expect("opens"));
    }
}

/// The content id changes with any bit of the file and with nothing else.
#[test]
fn the_content_id_depends_on_content_alone() {
    let bytes = TinyModel::default().writer().write();
    let id = |bytes: Vec<u8>| index(&ModelFile::from_bytes(bytes.into()).expect("opens")).content_id();
    assert_eq!(id(bytes.clone()), id(bytes.clone()));
    let mut other = bytes.clone();
    *other.last_mut().expect("bytes") ^= 1;
    assert_ne!(id(other), id(bytes));
}

#[test]
fn chunks_for_a_stage_hold_its_tensors_only() {
    let file = TinyModel { layers: 3, width: 1024, quant: QuantType::F16, ..TinyModel::default() }.open();
    let index = index(&file);
    let ranges = file.stage_ranges(1..2);
    let selected = index.chunks_for(&ranges);
    assert!(!selected.is_empty() && selected.windows(2).all(|w| w[0] < w[1]));
    for (number, chunk) in index.chunks().iter().enumerate() {
        let needed = match &chunk.content {
            Content::Rows { tensor, .. } => file.tensors()[*tensor as usize].name.starts_with("blk.1."),
            Content::Header | Content::Padding => false,
        };
        assert_eq!(selected.contains(&number), needed, "chunk {number}: {:?}", chunk.content);
    }
    let header = index.chunks_for(&[file.header_range()]);
    assert!(header.iter().all(|&c| index.chunks()[c].content == Content::Header));
    let backwards = std::ops::Range { start: 9, end: 5 };
    let everything = index.chunks_for(&[0..u64::MAX, 5..9, backwards]);
    let padding = index.chunks().iter().filter(|chunk| chunk.content == Content::Padding).count();
    assert_eq!(everything.len() + padding, index.chunks().len());
    assert!(index.chunks_for(&[]).is_empty() && index.chunks_for(&[7..7, 9..9]).is_empty());
}

/// An index from a peer, truncated at every length or with any byte changed, is rejected or still covers its file.
#[test]
fn a_malicious_index_is_rejected_or_valid() {
    let file = TinyModel { layers: 1, ..TinyModel::default() }.open();
    let bytes = index(&file).encode();
    for len in 0..bytes.len() {
        assert!(ShardIndex::decode(&bytes[..len]).is_err(), "cut at {len}");
    }
    assert!(ShardIndex::decode(&[&bytes[..], &[0]].concat()).is_err(), "a byte more");
    for at in 0..bytes.len() {
        for change in [0x01, 0x80, 0xff] {
            let mut corrupted = bytes.clone();
            corrupted[at] ^= change;
            if let Ok(index) = ShardIndex::decode(&corrupted) {
                assert_eq!(index.encode(), corrupted, "decoding is canonical");
                let end = index.chunks().last().map_or(0, |c| c.range.end);
                assert_eq!(end, index.file_len());
                assert!(index.content_id() != self::index(&file).content_id());
            }
        }
    }
    // A count that exceeds the actual records.
    let mut counted = bytes.clone();
    counted[24..28].copy_from_slice(&u32::MAX.to_le_bytes());
    assert!(matches!(ShardIndex::decode(&counted), Err(IndexError::Malformed(_))));
}
