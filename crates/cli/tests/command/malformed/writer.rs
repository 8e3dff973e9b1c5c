//! Safetensors files from raw text, so that any part of them can be malformed.

/// Entry of a header; all parts are JSON text.
#[derive(Debug, Clone)]
pub(super) struct Entry {
    pub(super) name: String,
    pub(super) dtype: String,
    pub(super) shape: String,
    pub(super) offsets: String,
}

/// File: entries in order, and the data.
#[derive(Debug, Clone, Default)]
pub(super) struct Model {
    pub(super) entries: Vec<Entry>,
    pub(super) data: Vec<u8>,
    /// JSON text before the entries.
    pub(super) before: String,
}

/// Returns the bytes of an element.
pub(super) fn width(dtype: &str) -> usize {
    match dtype {
        "F64" | "I64" | "U64" => 8,
        "F32" | "I32" | "U32" => 4,
        "F16" | "BF16" | "I16" | "U16" => 2,
        _ => 1,
    }
}

impl Model {
    /// Adds a tensor of zeros.
    pub(super) fn zeros(self, name: &str, dtype: &str, shape: &[usize]) -> Self {
        let bytes = shape.iter().product::<usize>() * width(dtype);
        self.tensor(name, dtype, shape, vec![0; bytes])
    }

    /// Adds a tensor of these integers.
    pub(super) fn numbers(self, name: &str, dtype: &str, shape: &[usize], numbers: &[i64]) -> Self {
        let bytes = numbers
            .iter()
            .flat_map(|number| number.to_le_bytes()[..width(dtype)].to_vec())
            .collect();
        self.tensor(name, dtype, shape, bytes)
    }

    /// Adds a tensor of these bytes.
    pub(super) fn tensor(
        mut self,
        name: &str,
        dtype: &str,
        shape: &[usize],
        bytes: Vec<u8>,
    ) -> Self {
        let begin = self.data.len();
        self.data.extend(bytes);
        self.entries.push(Entry {
            name: serde_json::to_string(name).unwrap(),
            dtype: format!("\"{dtype}\""),
            shape: format!("{shape:?}"),
            offsets: format!("[{begin},{}]", self.data.len()),
        });
        self
    }

    /// Returns the index of the entry of this name.
    pub(super) fn index(&self, name: &str) -> usize {
        self.entries.iter().position(|entry| entry.name == format!("\"{name}\"")).unwrap()
    }

    /// Returns the file without a tensor and its data.
    pub(super) fn without(&self, name: &str) -> Self {
        let mut other = Self { before: self.before.clone(), ..Self::default() };
        for entry in self.entries.iter().filter(|entry| entry.name != format!("\"{name}\"")) {
            let (begin, end) = self.extent(entry);
            let start = other.data.len();
            other.data.extend(&self.data[begin..end]);
            other.entries.push(Entry {
                offsets: format!("[{start},{}]", other.data.len()),
                ..entry.clone()
            });
        }
        other
    }

    /// Returns the file with a tensor of zeros instead of the one of this name.
    pub(super) fn replaced(&self, name: &str, dtype: &str, shape: &[usize]) -> Self {
        self.without(name).zeros(name, dtype, shape)
    }

    /// Returns begin and end of a well-formed entry.
    pub(super) fn extent(&self, entry: &Entry) -> (usize, usize) {
        let [begin, end]: [usize; 2] = serde_json::from_str(&entry.offsets).unwrap();
        (begin, end)
    }

    /// Returns the text of the header.
    pub(super) fn text(&self) -> String {
        let entry = |Entry { name, dtype, shape, offsets }: &Entry| {
            format!(r#"{name}:{{"dtype":{dtype},"shape":{shape},"data_offsets":{offsets}}}"#)
        };
        let entries: Vec<String> = self.entries.iter().map(entry).collect();
        format!("{{{}{}}}", self.before, entries.join(","))
    }

    /// Returns the bytes of the file.
    pub(super) fn bytes(&self) -> Vec<u8> {
        with_header(self.text().as_bytes(), &self.data)
    }
}

/// Returns a file with this header and this data.
pub(super) fn with_header(text: &[u8], data: &[u8]) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text, data].concat()
}
