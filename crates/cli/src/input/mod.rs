//! Input file of an attention: its tensors, the lengths that they determine, and one rank's rows.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use annulus::Tensors as Borrowed;
use annulus_core::{
    Batch, DType, DenseMask, Dims, Element, Error, KeyLists, Result, Runs, SinkShape,
};
use ndarray::{Array, Array2, Array3, Array4, IntoDimension};
use safetensors::tensor::TensorInfo;

use crate::{
    arguments::values,
    failure::{Outcome, of_file},
    file::{TensorFile, float, of_floats},
};

/// Element types of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// f64, f32, bf16 or f16.
    Floats,
    /// Integers or bools.
    Integers,
}

/// Input tensors: name, element types, and the lengths of the axes by letter: b batch, q and k
/// rows, h query heads, g KV heads, d head dim, v value dim. Without letters the shape has a check
/// of its own.
const TENSORS: [(&str, Kind, &str); 18] = [
    ("query", Kind::Floats, "bqhd"),
    ("key", Kind::Floats, "bkgd"),
    ("value", Kind::Floats, "bkgv"),
    ("dout", Kind::Floats, "bqhv"),
    ("dlse", Kind::Floats, "bhq"),
    ("bias", Kind::Floats, ""),
    ("attention_mask", Kind::Integers, ""),
    ("q_segment_ids", Kind::Integers, "bq"),
    ("kv_segment_ids", Kind::Integers, "bk"),
    ("cum_seqlens_q", Kind::Integers, ""),
    ("cum_seqlens_k", Kind::Integers, ""),
    ("softmax_aux", Kind::Floats, ""),
    ("q_positions", Kind::Integers, "bq"),
    ("kv_positions", Kind::Integers, "bk"),
    ("key_list_offsets", Kind::Integers, ""),
    ("key_list_indices", Kind::Integers, ""),
    ("key_list_ends", Kind::Integers, ""),
    ("key_list_bias", Kind::Floats, ""),
];
/// Names of output tensors, which the file of a case has too.
const OUTPUT_NAMES: [&str; 9] =
    ["out", "lse", "max", "sum", "dq", "dk", "dv", "dbias", "dsoftmax_aux"];

/// Open input file with consistent tensors.
#[derive(Debug)]
pub(crate) struct Input {
    path: PathBuf,
    tensors: TensorFile,
    /// Lengths of the whole problem.
    pub(crate) dims: Dims,
    /// Element type of query.
    pub(crate) dtype: DType,
    /// Shape of the bias `[b|1, h|1, q|1, k|1]`, if there is one.
    pub(crate) bias: Option<[usize; 4]>,
    /// Packed lengths of the command line, instead of `cum_seqlens_q` and `cum_seqlens_k`.
    documents: Option<Vec<i64>>,
}

/// Form of the file's sink logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum SinksForm {
    /// Shared by all heads: `[sinks]`.
    Shared,
    /// One set per query head: `[heads, sinks]`, or `[heads]` for one sink per head.
    PerHead,
}

/// One rank's rows of the input tensors.
#[derive(Debug)]
pub(crate) struct Share<T: Element> {
    q: Array4<T>,
    k: Array4<T>,
    v: Array4<T>,
    bias: Option<Array4<T::Accumulator>>,
    sinks: Option<Array2<T::Accumulator>>,
}

impl<T: Element> Share<T> {
    /// Borrows the tensors for a plan.
    pub(crate) fn tensors(&self) -> Borrowed<'_, T> {
        Borrowed {
            q: self.q.view(),
            k: self.k.view(),
            v: self.v.view(),
            bias: self.bias.as_ref().map(|bias| bias.view()),
            softmax_aux: self.sinks.as_ref().map(|sinks| sinks.view()),
        }
    }
}

/// One rank's rows of ∂L/∂out and, if the file has it, of ∂L/∂lse.
type OutputGradients<T> = (Array4<T>, Option<Array3<<T as Element>::Accumulator>>);

/// (length, tensor) pairs: the tensor that determines each length.
const LENGTHS: [(&str, &str); 7] = [
    ("batch", "query"),
    ("q_len", "query"),
    ("kv_len", "key"),
    ("q_heads", "query"),
    ("kv_heads", "key"),
    ("head_dim", "query"),
    ("value_dim", "value"),
];

fn is_input(name: &str) -> bool {
    TENSORS.iter().any(|(known, ..)| *known == name)
}

/// Adds the file to an error about a tensor, or about a length that a tensor determines.
fn name_file(path: &Path, error: Error) -> Error {
    let Error::InvalidArgument { argument, got, want } = &error else { return error };
    if let Some((length, tensor)) = LENGTHS.iter().find(|(length, _)| length == argument) {
        return of_file(path, &format!("{tensor}: {length}"), got, want);
    }
    if is_input(argument) { of_file(path, argument, got, want) } else { error }
}

impl Input {
    /// Opens a file and checks that its tensors are complete and consistent. Reads only the header.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        Self::of_tensors(path).map_err(|error| name_file(path, error))
    }

    fn of_tensors(path: &Path) -> Result<Self> {
        let tensors = TensorFile::open(path)?;
        let of_query = tensors.entry("query")?.dtype;
        let dtype =
            float(of_query).ok_or_else(|| Error::invalid("query", of_query, "a float dtype"))?;
        let shape4 = |name| {
            tensors
                .need(name, 4)
                .map(|entry| [entry.shape[0], entry.shape[1], entry.shape[2], entry.shape[3]])
        };
        let ([batch, q_len, q_heads, head_dim], [_, kv_len, kv_heads, _], [.., value_dim]) =
            (shape4("query")?, shape4("key")?, shape4("value")?);
        let dims = Dims { batch, q_len, kv_len, q_heads, kv_heads, head_dim, value_dim };
        let bias = tensors.get("bias").map(|_| shape4("bias")).transpose()?;
        let input = Self { path: path.to_owned(), tensors, dims, dtype, bias, documents: None };
        input.check()?;
        dims.validate()?;
        Ok(input)
    }

    /// Checks element types and shapes of the tensors against each other.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] naming the first tensor that does not match.
    fn check(&self) -> Result<()> {
        let Dims { batch, q_len, kv_len, q_heads, kv_heads, head_dim, value_dim } = self.dims;
        let length = |axis| match axis {
            'b' => batch,
            'q' => q_len,
            'k' => kv_len,
            'h' => q_heads,
            'g' => kv_heads,
            'd' => head_dim,
            _ => value_dim,
        };
        let want_dtype = of_floats(self.dtype);
        for (name, kind, axes) in TENSORS {
            let Some(TensorInfo { dtype, shape, .. }) = self.tensors.get(name) else { continue };
            if kind == Kind::Integers {
                self.tensors.refuse_floats(name)?;
            } else if float(*dtype).is_none() {
                return Err(Error::invalid(name, dtype, "a float dtype"));
            }
            if ["key", "value"].contains(&name) && *dtype != want_dtype {
                let want = format!("{want_dtype}, the dtype of query");
                return Err(Error::invalid(name, dtype, want));
            }
            let wrong = |want: String| Err(Error::invalid(name, format!("shape {shape:?}"), want));
            let want: Vec<usize> = axes.chars().map(length).collect();
            if !want.is_empty() && *shape != want {
                return wrong(format!("{want:?}, to match query and key"));
            }
            let one_or = |len: usize| if len == 1 { "1".to_owned() } else { format!("{len} or 1") };
            match (name, &shape[..]) {
                ("attention_mask", &[b, h, q, k])
                    if [batch, 1].contains(&b)
                        && [q_heads, 1].contains(&h)
                        && [q, k] == [q_len, kv_len] => {}
                ("attention_mask", _) => {
                    let broadcast = [batch, q_heads].map(one_or).join(", ");
                    return wrong(format!("[{broadcast}, {q_len}, {kv_len}]"));
                }
                ("cum_seqlens_q" | "cum_seqlens_k", shape) if shape.len() != 1 => {
                    return wrong("[sequences + 1]".to_owned());
                }
                ("key_list_offsets", shape) if shape.len() != 1 => {
                    return wrong("[lists + 1]".to_owned());
                }
                ("key_list_indices" | "key_list_ends" | "key_list_bias", shape)
                    if shape.len() != 1 =>
                {
                    return wrong("[listed pairs]".to_owned());
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Returns the first tensor that a KV cache has no place for.
    pub(crate) fn not_cached(&self) -> Option<&'static str> {
        let is_cached =
            |kind, name| kind == Kind::Floats && !["bias", "key_list_bias"].contains(&name);
        let mut all = TENSORS.into_iter().filter(|&(name, kind, _)| !is_cached(kind, name));
        all.find(|(name, ..)| self.has(name)).map(|(name, ..)| name)
    }

    /// Adds the packed documents of the command line.
    ///
    /// # Errors
    /// [`Failure::Usage`] if they do not fill both sequences; an invalid argument if the file has
    /// packed lengths of its own.
    pub(crate) fn packed(self, lengths: &[usize]) -> Outcome<Self> {
        values::check_documents(lengths, &self.dims)?;
        let own = ["cum_seqlens_q", "cum_seqlens_k"].into_iter().find(|name| self.has(name));
        match own {
            Some(name) if !lengths.is_empty() => {
                let got = format!("it, with {}", values::DOCUMENTS);
                Err(of_file(&self.path, name, got, "packed lengths from one of them").into())
            }
            _ => Ok(Self { documents: values::packed(lengths).cum_seqlens_q, ..self }),
        }
    }

    /// Lists tensors with unknown names, which are most likely misspelled.
    pub(crate) fn unknown_names(&self) -> Vec<String> {
        let is_known = |name: &str| is_input(name) || OUTPUT_NAMES.contains(&name);
        self.tensors.names().into_iter().filter(|name| !is_known(name)).collect()
    }

    /// Path of the file.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Adds this file to an error about a tensor, or about a length that a tensor determines.
    pub(crate) fn named(&self, error: Error) -> Error {
        name_file(&self.path, error)
    }

    /// True if the file has this tensor.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.tensors.get(name).is_some()
    }

    /// Tensors of the file.
    pub(crate) const fn tensors(&self) -> &TensorFile {
        &self.tensors
    }

    /// Returns the shape of the sink logits in the given form; `None` if the file has none. Without
    /// a form `[heads, sinks]` is per head, and `[n]` is an error because it is ambiguous.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] naming `softmax_aux`.
    pub(crate) fn sinks(&self, form: Option<SinksForm>) -> Result<Option<SinkShape>> {
        let heads = self.dims.q_heads;
        let Some(entry) = self.tensors.get("softmax_aux") else {
            return match form {
                None => Ok(None),
                Some(_) => Err(Error::invalid(
                    "softmax_aux",
                    "no such tensor in the input",
                    "one, or no --sinks",
                )),
            };
        };
        let shape = &entry.shape[..];
        let wrong =
            |want: String| Err(Error::invalid("softmax_aux", format!("shape {shape:?}"), want));
        let (per_head, count) = match (form, shape) {
            (Some(SinksForm::Shared), &[count] | &[1, count]) => (false, count),
            (Some(SinksForm::Shared), _) => return wrong("[sinks] for --sinks shared".into()),
            (Some(SinksForm::PerHead), &[lines]) if lines == heads => (true, 1),
            (None | Some(SinksForm::PerHead), &[lines, count]) if lines == heads => (true, count),
            (Some(SinksForm::PerHead), _) => {
                return wrong(format!("[{heads}, sinks] or [{heads}] for --sinks per-head"));
            }
            (None, [_]) => {
                return wrong(
                    "--sinks shared or --sinks per-head, because the shape is ambiguous".into(),
                );
            }
            (None, _) => return wrong(format!("[{heads}, sinks], or --sinks shared and [sinks]")),
        };
        Ok(Some(SinkShape { per_head, count }))
    }

    /// Reads one rank's rows of the float tensors, rounded once to `T`.
    pub(crate) fn share<T: Element>(
        &self,
        sinks: Option<SinkShape>,
        q_rows: &Runs,
        kv_rows: &Runs,
    ) -> Result<Share<T>> {
        let whole = |len: usize| Runs::counting(0, len as u64);
        let bias = self.bias.map(|shape| {
            let rows = if shape[2] == 1 { &whole(1) } else { q_rows };
            self.array::<T::Accumulator, _>(
                "bias",
                2,
                rows,
                [shape[0], shape[1], annulus_core::index(rows.len()), shape[3]],
            )
        });
        let sinks = sinks.map(|shape| {
            let lines = if shape.per_head { self.dims.q_heads } else { 1 };
            let first = self.tensors.get("softmax_aux").map_or(0, |entry| entry.shape[0]);
            self.array::<T::Accumulator, _>("softmax_aux", 0, &whole(first), [lines, shape.count])
        });
        let Dims { batch, q_heads, kv_heads, head_dim, value_dim, .. } = self.dims;
        let q_len = annulus_core::index(q_rows.len());
        let kv_len = annulus_core::index(kv_rows.len());
        Ok(Share {
            q: self.array("query", 1, q_rows, [batch, q_len, q_heads, head_dim])?,
            k: self.array("key", 1, kv_rows, [batch, kv_len, kv_heads, head_dim])?,
            v: self.array("value", 1, kv_rows, [batch, kv_len, kv_heads, value_dim])?,
            bias: bias.transpose()?,
            sinks: sinks.transpose()?,
        })
    }

    /// Reads one rank's rows of the dense mask, key lists, ids and positions.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] naming the tensor, [`Error::Io`], [`Error::OutOfMemory`].
    pub(crate) fn batch(&self, q_rows: &Runs, kv_rows: &Runs) -> Result<Batch> {
        Ok(Batch {
            attention_mask: self.attention_mask(q_rows)?,
            key_lists: self.key_lists(q_rows)?,
            ..self.coordinates_of(q_rows, kv_rows)?
        })
    }

    fn coordinates_of(&self, q_rows: &Runs, kv_rows: &Runs) -> Result<Batch> {
        let sequences = |name: &str| {
            if self.documents.is_some() {
                return Ok(self.documents.clone());
            }
            let entry = self.tensors.get(name);
            entry
                .map(|entry| {
                    self.tensors.integers(name, 0, &Runs::counting(0, entry.shape[0] as u64))
                })
                .transpose()
        };
        Ok(Batch {
            q_segment_ids: self.ids("q_segment_ids", q_rows)?,
            kv_segment_ids: self.ids("kv_segment_ids", kv_rows)?,
            q_positions: self.positions("q_positions", q_rows)?,
            kv_positions: self.positions("kv_positions", kv_rows)?,
            attention_mask: None,
            key_lists: None,
            cum_seqlens_q: sequences("cum_seqlens_q")?,
            cum_seqlens_k: sequences("cum_seqlens_k")?,
        })
    }

    /// Reads ids, positions and packed lengths of all rows, without the dense mask: O(sequence
    /// length).
    pub(crate) fn coordinates(&self) -> Result<Batch> {
        let all = |len: usize| Runs::counting(0, len as u64);
        let batch = self.coordinates_of(&all(self.dims.q_len), &all(self.dims.kv_len))?;
        batch.validate(&self.dims, self.dims.q_len, self.dims.kv_len)?;
        Ok(batch)
    }

    /// Reads one rank's rows of ∂L/∂out and, if the file has it, ∂L/∂lse.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if there is no `dout`; [`Error::Io`]; [`Error::OutOfMemory`].
    pub(crate) fn output_gradients<T: Element>(&self, q_rows: &Runs) -> Result<OutputGradients<T>> {
        self.tensors.need("dout", 4)?;
        let Dims { batch, q_heads, value_dim, .. } = self.dims;
        let q_len = annulus_core::index(q_rows.len());
        let dout = self.array("dout", 1, q_rows, [batch, q_len, q_heads, value_dim])?;
        let dlse = self
            .has("dlse")
            .then(|| self.array("dlse", 2, q_rows, [batch, q_heads, q_len]))
            .transpose()?;
        Ok((dout, dlse))
    }

    fn array<T: Element, D: IntoDimension>(
        &self,
        name: &str,
        axis: usize,
        rows: &Runs,
        shape: D,
    ) -> Result<Array<T, D::Dim>> {
        let values = self.tensors.floats::<T>(name, axis, rows)?;
        Array::from_shape_vec(shape, values)
            .map_err(|error| Error::invalid(name, error, "a dense tensor"))
    }

    fn ids(&self, name: &str, rows: &Runs) -> Result<Option<Array2<i32>>> {
        self.has(name)
            .then(|| self.lines(name, rows, self.tensors.narrow_integers(name, 1, rows)?))
            .transpose()
    }

    fn positions(&self, name: &str, rows: &Runs) -> Result<Option<Array2<i64>>> {
        self.has(name)
            .then(|| self.lines(name, rows, self.tensors.integers(name, 1, rows)?))
            .transpose()
    }

    fn lines<T>(&self, name: &str, rows: &Runs, values: Vec<T>) -> Result<Array2<T>> {
        let shape = (self.dims.batch, annulus_core::index(rows.len()));
        Array2::from_shape_vec(shape, values)
            .map_err(|error| Error::invalid(name, error, "a dense tensor"))
    }

    /// Reads the key lists of these query rows.
    fn key_lists(&self, q_rows: &Runs) -> Result<Option<Arc<KeyLists>>> {
        let Some(lists) = self.whole_key_lists()? else { return Ok(None) };
        let rows: Vec<u64> = q_rows.iter().map(i64::cast_unsigned).collect();
        Ok(Some(Arc::new(lists.select_queries(&rows)?)))
    }

    /// Reads the key lists of all queries, or of as many for each group of query heads.
    pub(crate) fn whole_key_lists(&self) -> Result<Option<KeyLists>> {
        let tensors = ["key_list_offsets", "key_list_indices", "key_list_ends", "key_list_bias"];
        let Some(name) = tensors.into_iter().find(|name| self.has(name)) else { return Ok(None) };
        if let Some(missing) = tensors[..2].iter().find(|name| !self.has(name)) {
            return Err(Error::invalid(*missing, "nothing", format!("one, since {name} is given")));
        }
        let all = |name: &str| {
            let len = self.tensors.get(name).map_or(0, |entry| entry.shape[0]);
            Runs::counting(0, len as u64)
        };
        let integers = |name: &str| self.tensors.integers(name, 0, &all(name));
        let [offsets, keys] = [integers(tensors[0])?, integers(tensors[1])?];
        let ends = if self.has(tensors[2]) { Some(integers(tensors[2])?) } else { None };
        let groups = (offsets.len().saturating_sub(1) / self.dims.q_len.max(1)).max(1);
        let mut lists = KeyLists::from_arrays([1, groups], &offsets, &keys, ends.as_deref())?;
        if self.has(tensors[3]) {
            lists =
                lists.with_bias(self.tensors.floats::<f64>(tensors[3], 0, &all(tensors[3]))?)?;
        }
        lists.validate(&self.dims, self.dims.q_len)?;
        Ok(Some(lists))
    }

    /// Reads the dense mask of these query rows, which is kept as bits.
    fn attention_mask(&self, q_rows: &Runs) -> Result<Option<DenseMask>> {
        let name = "attention_mask";
        let Some(entry) = self.tensors.get(name) else { return Ok(None) };
        let bits = self.tensors.bits(name, 2, q_rows)?;
        let rows = annulus_core::index(q_rows.len());
        let [batch, heads, kv_len] = [0, 1, 3].map(|axis| entry.shape[axis]);
        let mask = DenseMask::try_from_fn([batch, heads, rows, kv_len], |[b, h, q, k]| {
            let index = ((b * heads + h) * rows + q) * kv_len + k;
            bits[index / 64] >> (index % 64) & 1 == 1
        });
        mask.map(Some)
    }
}
