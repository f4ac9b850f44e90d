//! CPU kernels: one source per kernel, compiled for each instruction set and dispatched at run time.
//!
//! Products, norms and attention are bit-identical to [`crate::order`], for any number of rows or threads and any
//! instruction set.
//! Next: `cpu/simd.rs`, then `cpu/product.rs`.

pub mod activations;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod portable;
pub mod product;
pub mod rows;
pub mod simd;
pub mod words;

use simd::Kernel;

/// The supported instruction sets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    /// AVX-512 with VNNI.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// AVX2 with FMA and F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// Arrays, vectorised by the compiler if at all.
    Portable,
}

impl Isa {
    /// The best instruction set of this machine.
    pub fn detect() -> Self {
        Self::all()[0]
    }

    /// All instruction sets of this machine, best first.
    pub fn all() -> Vec<Self> {
        let mut found = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::is_x86_feature_detected as has;
            let avx2 = has!("avx2") && has!("fma") && has!("f16c");
            if avx2 && has!("avx512f") && has!("avx512bw") && has!("avx512dq") && has!("avx512vl") && has!("avx512vnni")
            {
                found.push(Self::Avx512);
            }
            if avx2 {
                found.push(Self::Avx2);
            }
        }
        found.push(Self::Portable);
        found
    }

    /// The common name.
    pub fn name(self) -> &'static str {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => "AVX-512 VNNI",
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => "AVX2",
            Self::Portable => "portable",
        }
    }

    /// Runs a kernel.
    ///
    /// # Safety
    /// The kernel's own contract; `self` comes from [`Self::detect`] or [`Self::all`].
    #[inline]
    pub unsafe fn run<K: Kernel>(self, kernel: K) -> K::Output {
        // SAFETY: the instruction set was detected; the rest is the kernel's contract.
        unsafe {
            match self {
                #[cfg(target_arch = "x86_64")]
                Self::Avx512 => on_avx512(kernel),
                #[cfg(target_arch = "x86_64")]
                Self::Avx2 => on_avx2(kernel),
                Self::Portable => kernel.run::<portable::Portable>(),
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn on_avx512<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: the caller's contract.
    unsafe { kernel.run::<avx512::Avx512>() }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn on_avx2<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: the caller's contract.
    unsafe { kernel.run::<avx2::Avx2>() }
}
