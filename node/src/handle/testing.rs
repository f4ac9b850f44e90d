//! Test support: models to serve, without a file.
use super::model::TextCodec;
use kernels_models::weights::testing::TinyModel;
use node_core::id::ContentId;
use node_core::work::serve::ModelSpec;
use partitioner::Work;

/// The vocabulary of a small model.
pub(super) fn words() -> TextCodec {
    TextCodec::of(&TinyModel::default().open()).unwrap()
}

/// A model without layers: its content is `content` repeated.
pub(super) fn spec(content: u8, context: u32) -> ModelSpec {
    let work = Work {
        layers: Vec::new(),
        embed_bytes: 0,
        head_bytes: 0,
        tied: false,
        head_flops: 0,
        activation_bytes: 0,
        coarser_bytes: Vec::new(),
        context,
        sequences: 4,
        scratch_bytes: 0,
    };
    let (content, name) = (ContentId([content; 32]), "tiny".into());
    ModelSpec {
        content,
        name,
        work,
        width: 8,
        boundary: Vec::new(),
        int8: true,
        eos: Vec::new(),
        replicas: 1,
        draft: None,
    }
}
