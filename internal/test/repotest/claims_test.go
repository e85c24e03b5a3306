package repotest

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"csi-registrar/internal/node/status"
	"csi-registrar/internal/sys/safetext"
)

// The daemon's answers are untrusted text for every command: no path, unit or ID of its document is
// a string, and no command converts one of them to a string without a check.
func TestClaimsOfTheDaemon(t *testing.T) {
	claims := map[string]bool{}
	var walk func(reflect.Type)
	walk = func(typ reflect.Type) {
		switch typ.Kind() {
		case reflect.Pointer, reflect.Slice, reflect.Map:
			walk(typ.Elem())
		case reflect.Struct:
			for field := range typ.Fields() {
				words := []string{"Socket", "Path", "Endpoint", "Unit", "Pod", "Container", "Registry"}
				names := slices.ContainsFunc(words, func(w string) bool { return strings.HasSuffix(field.Name, w) })
				switch {
				case field.Type == reflect.TypeFor[safetext.Claim]():
					claims[field.Name] = true
				case names && field.Type.Kind() == reflect.String && field.Tag.Get("json") != "-":
					t.Errorf("%s.%s is a string", typ, field.Name)
				default:
					walk(field.Type)
				}
			}
		}
	}
	walk(reflect.TypeFor[status.Document]())
	if len(claims) < 8 {
		t.Fatalf("only %v are claims", claims)
	}
	for _, dir := range []string{"internal/cli", "internal/tool"} {
		err := filepath.WalkDir(filepath.Join(top, dir), func(path string, _ fs.DirEntry, err error) error {
			if err != nil || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
				return err
			}
			set := token.NewFileSet()
			file, err := parser.ParseFile(set, path, nil, 0)
			if err != nil {
				return err
			}
			ast.Inspect(file, func(n ast.Node) bool {
				call, ok := n.(*ast.CallExpr)
				if !ok || len(call.Args) != 1 {
					return true
				}
				to, ok := call.Fun.(*ast.Ident)
				if !ok || to.Name != "string" {
					return true
				}
				if from, ok := call.Args[0].(*ast.SelectorExpr); ok && claims[from.Sel.Name] {
					t.Errorf("%s uses a claim of the daemon without a check", set.Position(call.Pos()))
				}
				return true
			})
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
}
