package compat

import (
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"csi-registrar/internal/safetext"
)

// isRegistrar reports whether the container runs node-driver-registrar: by its image, by
// the program it starts, or by the flag that no other program has.
func (c container) isRegistrar() bool {
	image, _, _ := strings.Cut(c.Image, "@")
	image = path.Base(image)
	image, _, _ = strings.Cut(image, ":")
	if strings.Contains(image, "node-driver-registrar") {
		return true
	}
	if len(c.Command) > 0 && strings.Contains(path.Base(c.Command[0]), "node-driver-registrar") {
		return true
	}
	return slices.ContainsFunc(slices.Concat(c.Command, c.Args), func(arg string) bool {
		return strings.Contains(arg, "-kubelet-registration-path")
	})
}

// flags is the command line without the program, $(VAR) not expanded yet.
func (c container) flags() ([]string, error) {
	if len(c.Command) == 0 {
		return c.Args, nil
	}
	program := path.Base(c.Command[0])
	if slices.Contains([]string{"sh", "bash", "ash", "dash"}, program) {
		return nil, fmt.Errorf("it is started by a shell (%s), which is not supported", program)
	}
	return slices.Concat(c.Command[1:], c.Args), nil
}

// flag finds the value of a flag, expanded; found is false if it is not there.
func (c container) flag(name string) (value string, found bool, err error) {
	args, err := c.flags()
	if err != nil {
		return "", false, err
	}
	for i, arg := range args {
		if !strings.HasPrefix(arg, "-") {
			continue
		}
		key, given, hasValue := strings.Cut(strings.TrimPrefix(arg[1:], "-"), "=")
		if key != name {
			continue
		}
		if !hasValue {
			if i+1 == len(args) {
				return "", false, fmt.Errorf("--%s has no value", name)
			}
			given = args[i+1]
		}
		if value, err = c.expand(given); err != nil {
			return "", false, fmt.Errorf("--%s: %w", name, err)
		}
		found = true // the last one counts, as with package flag
	}
	return value, found, nil
}

// expand replaces $(NAME) as Kubernetes does: from the literal env of the container,
// whose values may refer to entries before them; $$ is a $.
func (c container) expand(s string) (string, error) {
	// In order and once each, not by recursion: entries that name each other twice would
	// take for ever.
	vars := make(map[string]variable, len(c.Env))
	for _, e := range c.Env {
		var v variable
		if e.ValueFrom != nil {
			v.err = fmt.Errorf("the variable %s has a valueFrom: its value is not in the manifest", safetext.Word(e.Name))
		} else {
			v.value, v.err = c.replace(e.Value, vars)
		}
		vars[e.Name] = v
	}
	return c.replace(s, vars)
}

// variable is what an entry of env comes to, or why that cannot be known.
type variable struct {
	value string
	err   error
}

// maxValue bounds what expansion can make: entries that double each other reach anything.
const maxValue = 64 << 10

func (c container) replace(s string, vars map[string]variable) (string, error) {
	if isTemplate(s) {
		return "", errTemplate(s)
	}
	var b strings.Builder
	for {
		before, after, ok := strings.Cut(s, "$")
		b.WriteString(before)
		if b.Len() > maxValue {
			return "", errors.New("the value is endless")
		}
		if !ok {
			return b.String(), nil
		}
		name, rest, closed := strings.Cut(strings.TrimPrefix(after, "("), ")")
		switch {
		case strings.HasPrefix(after, "$"):
			b.WriteByte('$')
			s = after[1:]
		case !strings.HasPrefix(after, "(") || !closed:
			b.WriteByte('$')
			s = after
		default:
			v, err := c.lookup(name, vars)
			if err != nil {
				return "", err
			}
			b.WriteString(v)
			s = rest
		}
	}
}

func (c container) lookup(name string, vars map[string]variable) (string, error) {
	if v, ok := vars[name]; ok {
		return v.value, v.err
	}
	if len(c.EnvFrom) > 0 {
		return "", fmt.Errorf("the variable %s is not in env; it may come from envFrom, whose values are not in the manifest", safetext.Word(name))
	}
	return "", fmt.Errorf("the variable %s is not defined in the container's env", safetext.Word(name))
}

// hostPath maps a path in the container to the path on the node.
func (p podSpec) hostPath(c container, file string) (string, error) {
	best := c.mountOf(file)
	if best.MountPath == "" {
		return "", fmt.Errorf("no volume is mounted where %s is, so only the container itself sees it", safetext.Word(file))
	}
	i := slices.IndexFunc(p.Volumes, func(v volume) bool { return v.Name == best.Name })
	if i < 0 {
		return "", fmt.Errorf("%s is on the volume %s, which the pod does not define", safetext.Word(file), safetext.Word(best.Name))
	}
	v := p.Volumes[i]
	if v.HostPath == nil {
		return "", fmt.Errorf("%s is on the volume %s, which is %s: where that is on the node cannot be known",
			safetext.Word(file), safetext.Word(v.Name), v.kindOf())
	}
	sub := best.SubPath
	if best.SubPathExpr != "" {
		var err error
		if sub, err = c.expand(best.SubPathExpr); err != nil {
			return "", fmt.Errorf("the subPathExpr of volume %s: %w", safetext.Word(v.Name), err)
		}
	}
	for _, s := range []string{v.HostPath.Path, sub} {
		if isTemplate(s) {
			return "", fmt.Errorf("the volume %s: %w", safetext.Word(v.Name), errTemplate(s))
		}
	}
	if !strings.HasPrefix(v.HostPath.Path, "/") {
		return "", fmt.Errorf("the hostPath of volume %s is not absolute: %s", safetext.Word(v.Name), safetext.Quote(v.HostPath.Path))
	}
	rel := strings.TrimPrefix(path.Clean(file), best.MountPath)
	return path.Join(v.HostPath.Path, path.Join("/", sub), rel), nil
}

// mountOf finds the mount that a path in the container is on: the deepest one.
func (c container) mountOf(file string) (best volumeMount) {
	for _, m := range c.VolumeMounts {
		if under(file, m.MountPath) && len(path.Clean(m.MountPath)) > len(best.MountPath) {
			best = m
			best.MountPath = path.Clean(m.MountPath)
		}
	}
	return best
}

// kindOf names what a volume is that is no hostPath.
func (v volume) kindOf() string {
	if kinds := sortedKeys(v.Other); len(kinds) > 0 {
		if strings.ContainsAny(kinds[0][:min(1, len(kinds[0]))], "aeiou") {
			return "an " + safetext.Word(kinds[0])
		}
		return "a " + safetext.Word(kinds[0])
	}
	return "an emptyDir" // what Kubernetes takes a volume without a kind for
}

// under reports whether a clean path is dir or is below it.
func under(file, dir string) bool {
	if dir == "" {
		return false
	}
	file, dir = path.Clean(file), path.Clean(dir)
	return file == dir || dir == "/" || strings.HasPrefix(file, dir+"/")
}

func errTemplate(s string) error {
	return fmt.Errorf("%w: %s", errIsTemplate, safetext.Quote(s))
}

var errIsTemplate = errors.New("this is a template, not a manifest")

func isPrintable(s string) bool {
	return utf8.ValidString(s) && !strings.ContainsFunc(s, func(r rune) bool { return !unicode.IsPrint(r) })
}
