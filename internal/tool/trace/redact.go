package trace

import (
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// Limits of one message as it is shown.
const (
	maxShown     = 16 << 10 // bytes, about
	maxElements  = 20       // of a list
	maxShownText = 1 << 10  // bytes of a string
)

// redactor turns a message into JSON from which nothing can leak.
type redactor struct {
	keys []string // that are shown because a person asked for them
	out  []byte

	secrets []string // what the message held, to find it again in the text of an error
	partial bool     // it held more than that
}

// message writes a message. Texts in parentheses stand for what is hidden.
func (r *redactor) message(m protoreflect.Message) {
	r.open('{')
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		fd := fields.Get(i)
		if !m.Has(fd) {
			continue
		}
		r.key(fd.TextName())
		r.field(fd, m.Get(fd))
	}
	if unknown := m.GetUnknown(); len(unknown) > 0 {
		r.key("(unknown)")
		r.unknown(unknown)
	}
	r.close('}')
}

func (r *redactor) field(fd protoreflect.FieldDescriptor, v protoreflect.Value) {
	switch {
	case isSecret(fd):
		r.strip(fd, v)
		r.text("(stripped)")
	case fd.IsMap():
		r.mapping(fd, v.Map())
	case fd.IsList():
		r.open('[')
		for i := range v.List().Len() {
			if i == maxElements || len(r.out) > maxShown {
				r.element()
				r.text(fmt.Sprintf("(%d more)", v.List().Len()-i))
				r.partial = true
				break
			}
			r.element()
			r.value(fd, v.List().Get(i))
		}
		r.close(']')
	default:
		r.value(fd, v)
	}
}

// isSecret reports whether the specification marks the field as csi_secret.
func isSecret(fd protoreflect.FieldDescriptor) bool {
	secret, _ := proto.GetExtension(fd.Options(), csi.E_CsiSecret).(bool)
	return secret
}

// value writes a single value.
func (r *redactor) value(fd protoreflect.FieldDescriptor, v protoreflect.Value) {
	switch fd.Kind() {
	case protoreflect.MessageKind, protoreflect.GroupKind:
		r.message(v.Message())
	case protoreflect.StringKind:
		switch s := v.String(); {
		case fd.FullName() == mountFlags:
			r.mountFlag(s)
		case isShown(fd) || r.asked(fd.TextName()):
			r.plain(s)
		default:
			r.hide(s)
		}
	case protoreflect.BytesKind:
		r.hide(string(v.Bytes()))
	case protoreflect.EnumKind:
		if e := fd.Enum().Values().ByNumber(v.Enum()); e != nil {
			r.text(string(e.Name()))
		} else {
			r.out = strconv.AppendInt(r.out, int64(v.Enum()), 10)
		}
	case protoreflect.BoolKind:
		r.out = strconv.AppendBool(r.out, v.Bool())
	case protoreflect.DoubleKind, protoreflect.FloatKind: // CSI has none; JSON has no NaN
		r.text(strconv.FormatFloat(v.Float(), 'g', -1, 64))
	default:
		r.out = append(r.out, v.String()...) // an integer
	}
}

// mapping writes a map: the keys that are shown, and how many there are beside them.
func (r *redactor) mapping(fd protoreflect.FieldDescriptor, m protoreflect.Map) {
	all := isShown(fd)
	r.open('{')
	var keys []string
	size, count := 0, 0
	m.Range(func(k protoreflect.MapKey, v protoreflect.Value) bool {
		if key := k.String(); all || slices.Contains(shownKeys, key) || r.asked(key) {
			keys = append(keys, key)
		} else {
			if isSensitive(key) {
				r.secrets = append(r.secrets, v.String())
			}
			size += len(key) + len(v.String())
			count++
		}
		return true
	})
	slices.Sort(keys)
	for _, key := range keys {
		if len(r.out) > maxShown {
			count++
			continue
		}
		r.key(cut(key))
		v := m.Get(protoreflect.ValueOfString(key).MapKey())
		if fd.MapValue().Kind() == protoreflect.StringKind {
			r.plain(v.String())
		} else {
			r.value(fd.MapValue(), v)
		}
	}
	if count > 0 {
		r.key("(hidden)")
		r.text(fmt.Sprintf("%s, %d bytes", plural(count, "key"), size))
	}
	r.close('}')
}

// mountFlag writes the options of one flag; there may be several, with commas.
func (r *redactor) mountFlag(flag string) {
	var out []string
	for option := range strings.SplitSeq(flag, ",") {
		name, value, _ := strings.Cut(option, "=")
		switch {
		case r.asked(name), slices.Contains(strings.Fields(shownOptions), name) && strings.Trim(value, "0123456789.") == "":
			out = append(out, option)
		default:
			out = append(out, fmt.Sprintf("(%d bytes)", len(option)))
			if isSensitive(name) {
				r.secrets = append(r.secrets, value)
			}
		}
	}
	r.text(strings.Join(out, ","))
}

// unknown writes the fields that the descriptors do not have.
func (r *redactor) unknown(b []byte) {
	r.open('[')
	for n := 0; len(b) > 0; n++ {
		number, kind, tag := protowire.ConsumeTag(b)
		length := protowire.ConsumeFieldValue(number, kind, b[max(tag, 0):])
		if tag < 0 || length < 0 || n == maxElements {
			r.element()
			r.text(fmt.Sprintf("(%d more bytes)", len(b)))
			r.secrets = append(r.secrets, string(b))
			break
		}
		r.element()
		r.text(fmt.Sprintf("%d: %d bytes", number, length))
		if value, n := protowire.ConsumeBytes(b[tag:]); kind == protowire.BytesType && n >= 0 {
			r.secrets = append(r.secrets, string(value)) // nobody knows what it is
		}
		b = b[tag+length:]
	}
	r.close(']')
}

// strip notes what a secret field held.
func (r *redactor) strip(fd protoreflect.FieldDescriptor, v protoreflect.Value) {
	switch {
	case fd.IsMap():
		v.Map().Range(func(_ protoreflect.MapKey, v protoreflect.Value) bool {
			r.secrets = append(r.secrets, v.String())
			return true
		})
	case fd.Kind() == protoreflect.StringKind && !fd.IsList():
		r.secrets = append(r.secrets, v.String())
	default: // CSI has none
		r.partial = true
	}
}

// asked reports whether a person asked for the values of a key.
func (r *redactor) asked(key string) bool { return slices.Contains(r.keys, key) }

func (r *redactor) hide(s string) {
	r.text(fmt.Sprintf("(%d bytes)", len(s)))
}

func (r *redactor) plain(s string) {
	r.text(cut(s))
}

// cut limits the length of a string that is shown.
func cut(s string) string {
	if len(s) <= maxShownText {
		return s
	}
	return strings.ToValidUTF8(s[:maxShownText], "") + "…"
}

// The syntax of JSON.

func (r *redactor) open(c byte) { r.out = append(r.out, c) }

func (r *redactor) close(c byte) { r.out = append(r.out, c) }

// element begins an element of a list, or a member of an object.
func (r *redactor) element() {
	if last := r.out[len(r.out)-1]; last != '[' && last != '{' {
		r.out = append(r.out, ',')
	}
}

func (r *redactor) key(name string) {
	r.element()
	r.text(name)
	r.out = append(r.out, ':')
}

func (r *redactor) text(s string) {
	b, err := json.Marshal(s) // of a string it cannot fail
	if err != nil {
		b = []byte(`""`)
	}
	r.out = append(r.out, b...)
}

// plural is a number of things, in words.
func plural(n int, word string) string {
	if n == 1 {
		return "1 " + word
	}
	return fmt.Sprintf("%d %ss", n, word)
}
