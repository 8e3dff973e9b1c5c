//! The attention of a part of the heads. Everything that depends on a head keeps its number in the
//! whole attention: masks, bias functions, dropout.

use std::{ops::Range, sync::Arc};

use crate::{
    BiasFunction, Dims, Fingerprint, HeadShard, KeyIntervals, Mask, Result, Spec,
    mask::{Band, Key, Query, SharedMask},
};

impl Spec {
    /// Returns the spec of the query heads `heads`, which have `kv_heads` KV heads.
    #[must_use]
    pub fn of_heads(&self, heads: Range<usize>, kv_heads: usize) -> Self {
        let q_heads = self.dims.q_heads;
        if heads.len() == q_heads {
            return self.clone();
        }
        let Range { start: first, .. } = heads;
        let dims = Dims { q_heads: heads.len(), kv_heads, ..self.dims };
        let mask: SharedMask = if self.mask.per_head() {
            Arc::new(HeadShardMask { whole: Arc::clone(&self.mask), first, q_heads })
        } else {
            Arc::clone(&self.mask)
        };
        let bias_function = self.bias_function.as_ref().map(|function| {
            let whole = Arc::clone(function);
            Arc::new(HeadShardBias { whole, first }) as Arc<dyn BiasFunction>
        });
        let bias = self.bias.map(|[batch, of_heads, queries, keys]| {
            [batch, if of_heads == 1 { 1 } else { heads.len() }, queries, keys]
        });
        let head_shard = Some(HeadShard { first, q_heads });
        Self { dims, mask, bias_function, bias, head_shard, ..self.clone() }
    }
}

/// The mask of the heads from `first` on of a whole attention.
#[derive(Debug)]
struct HeadShardMask {
    whole: SharedMask,
    first: usize,
    /// Query heads of the whole attention.
    q_heads: usize,
}

impl HeadShardMask {
    const fn whole_query(&self, query: &Query) -> Query {
        Query { head: query.head + self.first, ..*query }
    }
}

impl Mask for HeadShardMask {
    fn fingerprint(&self, into: Fingerprint) -> Fingerprint {
        self.whole.fingerprint(into.text("heads from").number(self.first as u64))
    }

    fn visible(&self, query: &Query, key: &Key) -> bool {
        self.whole.visible(&self.whole_query(query), key)
    }

    fn intervals(&self, query: &Query) -> Option<KeyIntervals> {
        self.whole.intervals(&self.whole_query(query))
    }

    fn bound(&self, query: &Query) -> KeyIntervals {
        self.whole.bound(&self.whole_query(query))
    }

    fn band(&self, batch: usize, head: usize) -> Option<Band> {
        self.whole.band(batch, head + self.first)
    }

    fn per_head(&self) -> bool {
        self.whole.per_head()
    }

    fn per_batch(&self) -> bool {
        self.whole.per_batch()
    }

    fn validate(&self, dims: &Dims) -> Result<()> {
        self.whole.validate(&Dims { q_heads: self.q_heads, ..*dims })
    }
}

/// The bias function of the heads from `first` on of a whole attention.
#[derive(Debug)]
struct HeadShardBias {
    whole: Arc<dyn BiasFunction>,
    first: usize,
}

impl BiasFunction for HeadShardBias {
    fn fingerprint(&self, into: Fingerprint) -> Fingerprint {
        self.whole.fingerprint(into.text("heads from").number(self.first as u64))
    }

    fn bias(&self, query: &Query, key: &Key) -> f64 {
        self.whole.bias(&Query { head: query.head + self.first, ..*query }, key)
    }

    fn distance_slopes(&self) -> Option<&[f64]> {
        // heads beyond the last slope have none
        self.whole.distance_slopes().map(|slopes| slopes.get(self.first..).unwrap_or_default())
    }
}
