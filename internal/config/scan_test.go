package config

import (
	"fmt"
	"reflect"
	"strings"
	"testing"
)

func TestScan(t *testing.T) {
	const text = `# "not" = a.key
a.b."c d" = 1 # x = 2
"a".e = """
[no.table]
x = "1\""" """" # two quotes are part of it
a.f = '''
y = '1'
''''
g = { h = [ { no = 1 }, # ]
  "]", ] , i.j = 'i' , } # }

 [ t . 'u.v' ] # [x]
"\u0077\t" = [
  [ 1, 2 ],
  'two' ]
dt = 1979-05-27 07:32:00 # o'clock
[[arr]]
z = true
[[arr]]
z = -inf
`
	got := scan(text)
	lines := make(map[string]string)
	for key, s := range got {
		lines[key] = fmt.Sprint(s.line, " ", s.text, " ", s.elements, " ", s.named)
	}
	want := map[string]string{
		`"a"`:             `2  [] false`,
		`"a"."b"`:         `2  [] false`,
		`"a"."b"."c d"`:   `2 1 [] true`,
		`"a"."e"`:         "3 \"\"\"\n[no.table]\nx = \"1\\\"\"\" \"\"\"\" [] true",
		`"a"."f"`:         "6 '''\ny = '1'\n'''' [] true",
		`"g"`:             "9 { h = [ { no = 1 }, # ]\n  \"]\", ] , i.j = 'i' , } [] true",
		`"g"."h"`:         "9 [ { no = 1 }, # ]\n  \"]\", ] [9 10] true",
		`"g"."i"`:         `10  [] false`,
		`"g"."i"."j"`:     `10 'i' [] true`,
		`"t"`:             `12  [] false`,
		`"t"."u.v"`:       `12  [] true`,
		`"t"."u.v"."w\t"`: "13 [\n  [ 1, 2 ],\n  'two' ] [14 15] true",
		`"t"."u.v"."dt"`:  `16 1979-05-27 07:32:00 [] true`,
		`"arr"`:           `17  [] true`,
		`"arr"."z"`:       `18 true [] true`,
	}
	if !reflect.DeepEqual(lines, want) {
		for k, v := range want {
			if lines[k] != v {
				t.Errorf("%s: got %q, want %q", k, lines[k], v)
			}
		}
		for k, v := range lines {
			if _, ok := want[k]; !ok {
				t.Errorf("%s: %q", k, v)
			}
		}
	}
	if _, wrong := decode(text); wrong != nil {
		t.Errorf("the text is no TOML: %+v", wrong)
	}
}

// TestScanEnds: on what is no TOML it may find anything, but it ends.
func TestScanEnds(t *testing.T) {
	whole := "[a]\nb = [1, {c = \"d\\u0041\"}, '''e''', \"\"\"f\"\"\"]\n[[x.'y']]\n= ] } {[("
	for from := range len(whole) {
		for to := from; to <= len(whole); to++ {
			scan(whole[from:to])
		}
	}
	scan(strings.Repeat("[{", 100))
}
